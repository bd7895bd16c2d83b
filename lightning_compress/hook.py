"""Where compression meets DistributedDataParallel: its buckets in, our groups out."""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_compress import checks
from lightning_compress.codecs import Dense
from lightning_compress.collectives import Collective, CountingCollective, TorchCollective
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.group import Group, Scratch
from lightning_compress.meter import Meter
from lightning_compress.settings import CompressorLike, ExchangeLike, Settings

# No `from __future__ import annotations` here: DistributedDataParallel looks at the hook's annotations.

ScaleSource = Callable[[], Tensor | None]


class Compression:
    """The compression of one DistributedDataParallel model, from ``attach`` to ``close``.

    A step ends when an optimizer that owns any of the model's parameters has really stepped: then residuals are
    committed. ``roll_back`` ends it without.

    Args:
        ddp: the model.
        settings: what the user chose, equal on all ranks.
        collective: the ranks to average over.
        scale: returns what the loss is multiplied by (a GradScaler's scale), or None.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        settings: Settings,
        collective: Collective,
        scale: ScaleSource = lambda: None,
    ) -> None:
        parameters = checks.trained_parameters(ddp.module)
        self.settings = settings
        self.device = parameters[0][1].device
        self.meter = Meter(self.device)
        self.step = 0
        self.groups: list[Group] = []
        self._collective = CountingCollective(collective, self.meter)
        self._scale = scale
        self._names = {id(parameter): name for name, parameter in parameters}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self._by_bucket: dict[tuple[int, ...], Group] = {}
        self._owner: dict[str, Group] = {}
        self._scratch = Scratch(self.device)
        self._flag = torch.zeros((), device=self.device)
        self._nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self._unhooked_bytes = 0
        self._join_check = ddp.register_forward_pre_hook(lambda module, _: checks.check_running(module))
        _watch_optimizers()
        _live.add(self)

    def register(self, ddp: DistributedDataParallel) -> None:
        """Take the averaging over from ``ddp``."""
        ddp.register_comm_hook(None, self.hook)

    def leave_to(self, ddp: DistributedDataParallel) -> None:
        """Let ``ddp`` average by itself, and only count what it sends."""
        parameters = [parameter for _, parameter in checks.trained_parameters(ddp.module)]
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        self._unhooked_bytes = all_reduce_bytes(size, self._collective.size)

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Replace a bucket's gradients by their mean; synchronous, in the order of DistributedDataParallel."""
        buffer = bucket.buffer()
        if self._stream is None:
            self._reduce(bucket)
            future: Future[Tensor] = Future()
            future.set_result(buffer)
            return future
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._reduce(bucket)
            buffer.record_stream(self._stream)
            future = Future(devices=[self.device])
            future.set_result(buffer)
        return future

    def _reduce(self, bucket: Any) -> None:
        buffer = bucket.buffer()
        group = self._group(bucket.parameters())
        self.meter.bytes_dense += all_reduce_bytes(buffer.numel() * buffer.element_size(), self._collective.size)
        self._flag.add_(group.reduce(bucket.gradients(), self.step, self._scale()))

    def _group(self, parameters: Sequence[Tensor]) -> Group:
        """The group of a bucket; made, with the residuals its parameters have so far, when the bucket is new."""
        bucket = tuple(map(id, parameters))
        if bucket not in self._by_bucket:
            names = [self._names[each] for each in bucket]
            shaped = [(name, self._shapes[name]) for name in names]
            self._scratch.clear()
            group = Group(shaped, self.settings, self._collective, self.device, self.meter, self._scratch)
            self._take_over(group)
            self._by_bucket[bucket] = group
        return self._by_bucket[bucket]

    def _take_over(self, group: Group) -> None:
        """Move state from the groups that had these parameters, and drop those that have none left."""
        for old in self.groups:
            names = [name for name in group.names if self._owner.get(name) is old]
            if names and old.residual and group.residual:
                group.residual.adopt(old.residual, names)
        self._owner.update(dict.fromkeys(group.names, group))
        self.groups = [each for each in [*self.groups, group] if each in self._owner.values()]
        self._by_bucket = {bucket: each for bucket, each in self._by_bucket.items() if each in self.groups}

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps any of the model's parameters."""
        return any(id(parameter) in self._names for group in optimizer.param_groups for parameter in group["params"])

    def commit(self) -> None:
        """The optimizer stepped: residuals become true, unless a rank's gradient was not finite."""
        rejected = self._flag.isnan()
        self._nonfinite_steps.add_(rejected)
        for group in self.groups:
            if group.residual:
                group.residual.commit(rejected)
        self._flag.zero_()
        self.step += 1
        self.meter.bytes_sent += self._unhooked_bytes
        self.meter.bytes_dense += self._unhooked_bytes
        self.meter.end_step()

    def roll_back(self) -> None:
        """The optimizer did not step: residuals stay as they were."""
        self._nonfinite_steps.add_(self._flag.isnan())
        for group in self.groups:
            if group.residual:
                group.residual.roll_back()
        self._flag.zero_()

    def stats(self) -> dict[str, float]:
        """Traffic of the last step and in total; on a sampled step also times, error and residual norm.

        Returns:
            ``bytes_sent``, ``bytes_dense`` (what stock DDP sends), ``ratio`` of the last step; ``total_bytes_sent``,
            ``total_bytes_dense``, ``steps``, ``nonfinite_steps``; and, of steps that ran after
            ``meter.begin_sampling()``, ``encode_ms``, ``exchange_ms``, ``decode_ms``, ``relative_error`` (the norm of
            what was not sent over that of gradient plus residual) and ``residual_norm``.
        """
        sampled = self.meter.sampling
        figures = self.meter.read() | {"nonfinite_steps": float(self._nonfinite_steps)}
        if sampled:
            norms = [group.residual.committed.norm() for group in self.groups if group.residual]
            figures["residual_norm"] = float(torch.stack(norms).norm()) if norms else 0.0
        return figures

    def close(self) -> None:
        """Stop watching the optimizers; the hook itself ends with the model."""
        _live.discard(self)
        self._join_check.remove()
        self.groups.clear()
        self._by_bucket.clear()
        self._owner.clear()
        self._scratch.clear()


_live: "weakref.WeakSet[Compression]" = weakref.WeakSet()


@cache
def _watch_optimizers() -> None:
    """Commit after every step of an optimizer that owns parameters of a compressed model; one hook per process."""

    def commit_owners(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for compression in list(_live):
            if compression.owns(optimizer):
                compression.commit()

    register_optimizer_step_post_hook(commit_owners)


def attach(
    ddp: DistributedDataParallel,
    compressor: CompressorLike = "bf16",
    exchange: ExchangeLike = "auto",
    error_feedback: bool | None = None,
    warmup_steps: int = 0,
    min_numel: int = 1024,
    exclude: Sequence[str] = (),
    seed: int = 0,
    scale: ScaleSource = lambda: None,
) -> Compression:
    """Compress the gradient averaging of a bare DistributedDataParallel model.

    Call it on every rank, once, before the first backward. ``none`` and one rank leave the model as it is.

    Args:
        ddp: the model.
        compressor: see ``CompressedDDPStrategy``, as the other arguments.
        exchange: the pattern in which messages travel.
        error_feedback: add what was not sent to the next gradient.
        warmup_steps: dense steps before compression begins.
        min_numel: smaller parameters stay dense.
        exclude: patterns of parameter names that stay dense.
        seed: of all randomness.
        scale: returns what the loss is multiplied by (``scaler._scale`` of a GradScaler), so that residuals survive a
            change of it; None where there is no scaler.

    Returns:
        the handle: ``stats()``, ``roll_back()`` and ``close()``.

    Raises:
        ValueError: settings, module or ranks that cannot work together.
    """
    settings = Settings.of(compressor, exchange, error_feedback, warmup_steps, min_numel, exclude, seed)
    collective = TorchCollective(ddp.process_group)
    check_setup(settings, ddp.module, collective, next(ddp.module.parameters()).device)
    return compress(ddp, settings, scale)


def check_setup(settings: Settings, module: nn.Module, collective: Collective, device: torch.device) -> None:
    """Everything that can be refused before training; talks to the other ranks.

    Raises:
        ValueError: on every rank.
    """
    checks.check_module(module)
    settings.rules.check(checks.shapes(checks.trained_parameters(module)))
    checks.check_ranks_agree(settings, module, collective, device)


def compress(ddp: DistributedDataParallel, settings: Settings, scale: ScaleSource = lambda: None) -> Compression:
    """``attach`` for what was checked already."""
    collective = TorchCollective(ddp.process_group)
    compression = Compression(ddp, settings, collective, scale)
    if collective.size == 1 or isinstance(settings.codec, Dense):
        compression.leave_to(ddp)
    else:
        compression.register(ddp)
    return compression
