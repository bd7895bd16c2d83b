"""Methods that come with PyTorch and Lightning, by PyTorch's own code; nothing here imports the package."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks._network.hooks import bf16_mean, hooked, nothing, power_sgd
from benchmarks._target.averaging import Averaging, MakeOptimizer

HOOKS: dict[str, Any] = {"fp16": default_hooks.fp16_compress_hook, "bf16": bf16_mean, "nothing": nothing}


class Accumulating(Averaging):
    """DistributedDataParallel that averages, and steps, once in ``every`` batches."""

    _done = 0

    def batch(self, inputs: Tensor) -> None:
        """See ``Averaging``."""
        if self._done % self.every == 0:
            self.optimizer.zero_grad()
        self._done += 1
        last = self._done % self.every == 0
        with nullcontext() if last else self.model.no_sync():  # type: ignore[operator]
            (self.model(inputs) / self.every).backward()
        if last:
            self.optimizer.step()


def build(settings: dict[str, Any], module: nn.Module, optimizer: MakeOptimizer) -> Averaging:
    """Wrap a module; collective.

    Args:
        settings: ``cap``, megabytes of a bucket; ``hook``, one of ``HOOKS``; ``every``, batches accumulated; ``power``,
            the PowerSGD hook's rank, and ``start``, its dense steps; ``local``, steps between two averages of
            post-local SGD, and ``start``, its dense steps.
        module: returns the loss of a batch.
        optimizer: makes one.
    """
    if "local" in settings:
        return _post_local(settings["local"], settings["start"], module, optimizer)
    if "power" in settings:
        model = power_sgd(settings["power"], max(2, settings["start"]))(module)[0]
    elif "hook" in settings:
        model = hooked(HOOKS[settings["hook"]])(module)[0]
    else:
        model = DistributedDataParallel(module, bucket_cap_mb=settings.get("cap"))
    kind = Accumulating if "every" in settings else Averaging
    return kind(model, optimizer(module.parameters()), settings.get("every", 1))


def _post_local(every: int, start: int, module: nn.Module, optimizer: MakeOptimizer) -> Averaging:
    """Build post-local SGD from the parts that Lightning uses: PyTorch's hook, averager and optimizer."""
    # every rank is a node of its own, so nothing is averaged within one
    state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, None, start, post_local_gradient_allreduce=False)
    model = hooked(post_localSGD_hook.post_localSGD_hook, lambda: state)(module)[0]
    averager = PeriodicModelAverager(every, warmup_steps=start)
    return Averaging(model, PostLocalSGDOptimizer(optimizer(module.parameters()), averager), every)
