"""Host time of a bucket on the path for GPUs, and of PyTorch's hook for bfloat16, without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import kernels
from lightning_compress.collectives.collective import Overlapping, Wait
from lightning_compress.collectives.torch import TorchCollective, _waiting, prepare_directly
from lightning_compress.core.vector import _zeros
from lightning_compress.engine import programs
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import bucket_of
from lightning_compress.settings.compensation import kind_of
from lightning_compress.settings.run_state import RunState

BUCKETS, SIDE = 64, 32


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(SIDE, SIDE) for _ in range(BUCKETS))

    def forward(self, numbers: Tensor) -> Tensor:
        return torch.stack([(numbers * each).sum() for each in self.all]).sum()


class _Directly(TorchCollective):
    """Starts collectives as it does by NCCL."""

    def begin(self, name: Overlapping, *arguments: Any) -> Wait:
        return self.prepare(name, *arguments)()

    def prepare(self, name: Overlapping, *arguments: Any) -> Callable[[], Wait]:
        return partial(_waiting, prepare_directly(dist.group.WORLD, name, *arguments))  # type: ignore[arg-type]


def _triton(device: torch.device) -> str:
    return "triton"


def _nothing(*_: object, **__: object) -> None:
    """Stand for a launch."""


class _Done:
    """The end of a collective of the process group, whose own future has no result."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        future.set_result([self._tensor])
        return future


def theirs(steps: int, begin: Callable[..., object] = dist.all_reduce) -> float:
    """Return the host time of PyTorch's hook in microseconds a bucket."""

    def all_reduce(tensor: Tensor, *given: Any, **options: Any) -> _Done:
        begin(tensor, *given, **options)
        return _Done(tensor)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        return _timed(bf16_compress_hook, steps, lambda _: None)


@contextmanager
def _without_launches() -> Iterator[None]:
    """Take a CPU for what Triton compiles for, and launch nothing."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launch = import_module("lightning_compress.kernels.triton.launch")

    def bind(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], kept: Any) -> Any:
        return _nothing, [*range(13), *arguments]  # as many as the launcher of a compiled kernel gets

    with (
        mock.patch.object(kernels, "compiler", _triton),
        mock.patch.object(JITFunction, "run", _nothing),
        mock.patch.object(InterpretedFunction, "run", _nothing),
        mock.patch.object(launch, "bind", bind),
        mock.patch.object(programs, "new_flag", lambda device: next(_zeros(device))),  # as on an accelerator
    ):
        yield


def _timed(hook: Callable[[Any, Any], Any], steps: int, begin: Callable[[DistributedDataParallel], Any]) -> float:
    """Return the least time that a step spends in the hook, in microseconds a bucket."""
    model = DistributedDataParallel(_Model(), bucket_cap_mb=0.9 * SIDE * SIDE * 4 / 2**20)
    optimizer, spent, least = torch.optim.SGD(model.parameters(), 1e-6), [0.0], float("inf")
    state = begin(model)

    def timed(_: object, bucket: Any) -> Any:
        start = time.thread_time()
        result = hook(state, bucket)
        spent[0] += time.thread_time() - start
        return result

    timed.__annotations__ = {}  # DistributedDataParallel would check them
    model.register_comm_hook(None, timed)
    for step in range(steps + 5):
        spent[0] = 0.0
        optimizer.zero_grad()
        model(torch.ones(SIDE, SIDE)).backward()
        optimizer.step()
        least = min(least, spent[0]) if step >= 5 else least
    if isinstance(state, Compression):
        state.close()
    return 1e6 * least / BUCKETS


def _average(compression: Compression, bucket: Any) -> Future[Tensor]:
    compression.reduce(bucket_of(compression, bucket.parameters()), bucket.gradients())
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def ours(method: str, exchange: str, steps: int, recorded: bool) -> float:
    """Return our host time of a bucket in microseconds, by the ordinary path or by a program."""

    def begin(model: DistributedDataParallel) -> Compression:
        settings = RunState.of(method, exchange, schedule="none", check_drift_every=0)
        settings = settings.stepped_by(kind_of([torch.optim.SGD(model.parameters(), 0.1)]))
        compression = Compression(trained(model.module), settings, _Directly(), unused=False)
        compression.meter.sample_every, compression.active = 0, True
        return compression

    with _without_launches(), nullcontext() if recorded else mock.patch.object(programs, "MOST", 0):
        return _timed(_average, steps, begin)
