"""What averaging a bucket starts on a GPU, counted on the device "meta": nothing is launched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._gpu.echo import EchoCollective
from lightning_compress import kernels
from lightning_compress.core.vector import _zeros
from lightning_compress.engine import programs
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import bucket_of
from lightning_compress.settings.compensation import kind_of
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState

VIEWS = {"view", "slice", "select", "split", "split_with_sizes", "unbind", "as_strided", "alias", "detach", "expand"}
VIEWS |= {"unsqueeze", "squeeze", "t", "transpose", "permute", "_unsafe_view", "_reshape_alias", "reshape", "chunk"}
VIEWS |= {"empty", "empty_like", "empty_strided", "new_empty"}
"""Operations of PyTorch that start nothing."""
BUCKET = [(256, 256)] * 6 + [(256,)] * 6
STEPS = 5
"""The last of them is counted. Plans are made in the first. Two memories of a state take turns, and what a step does
with either is recorded when it is done for the second time."""


class _Ranks(EchoCollective):
    """As many ranks, whose collectives are noted and move nothing."""

    def __init__(self, size: int, log: list[str]) -> None:
        super().__init__(size)
        self._log = log

    def all_reduce(self, tensor: Tensor, operation: object = "sum") -> None:
        self._log.append("NCCL all_reduce")

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        self._log.append("NCCL all_gather")

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        self._log.append("NCCL all_to_all")


class _Operations(TorchDispatchMode):
    """Notes what PyTorch's operations start."""

    def __init__(self, log: list[str], views: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._left_out = log, set[str]() if views else VIEWS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in self._left_out:
            self._log.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_a_gpu(log: list[str]) -> Iterator[None]:
    """Note the kernels of Triton, and take them for what the device "meta" is compiled for."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launch = import_module("lightning_compress.kernels.triton.launch")

    real = kernels.compiler

    def note(kernel: Any, *_: object, **__: object) -> None:
        log.append(f"triton:{kernel.fn.__name__}")

    def bind(kernel: Any, *_: object) -> Any:
        return log.append, [f"triton:{kernel.fn.__name__}"]

    _zeros.cache_clear()  # no step but the first allocates flags
    with ExitStack() as patched:
        replaced = {
            (kernels, "compiler"): lambda device: "triton" if device.type == "meta" else real(device),
            (launch, "bind"): bind,
            (Tensor, "data_ptr"): lambda tensor: tensor.storage_offset() * tensor.element_size(),
            (JITFunction, "run"): note,
            (InterpretedFunction, "run"): note,
        }
        for (owner, name), function in replaced.items():
            patched.enter_context(mock.patch.object(owner, name, function))
        yield


class Bucket(nn.Module):
    """Parameters whose gradients lie side by side."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.empty(shape, device=device) for shape in shapes)
        sizes = [each.numel() for each in self.parts]
        whole = torch.zeros(sum(sizes), device=device)
        self.gradients = [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]


def averaging(
    method: str,
    exchange: str,
    ranks: int,
    log: list[str],
    device: torch.device,
    shapes: Sequence[tuple[int, ...]] = tuple(BUCKET),
    scale: Callable[[], Tensor | None] = lambda: None,
    unused: bool = False,
    **settings: Any,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what averages a bucket, and what commits the step.

    Args:
        method: name of the compressor.
        exchange: how messages travel.
        ranks: that are pretended.
        log: where collectives are noted.
        device: "meta", or a CPU.
        shapes: of the bucket's parameters.
        scale: see ``attach``.
        unused: parameters may be without a gradient.
        **settings: see ``attach``.
    """
    bucket = Bucket(shapes, device)
    optimizer = torch.optim.SGD(bucket.parameters(), 0.1)
    given = {"schedule": "none", "check_drift_every": 0, **settings}
    chosen = RunState.of(method, exchange, **given).bound(kinds_of(bucket)).stepped_by(kind_of([optimizer]))
    compression = Compression(trained(bucket), chosen, _Ranks(ranks, log), scale, unused=unused)
    compression.meter.sample_every, compression.active = 0, True
    names = bucket_of(compression, list(bucket.parameters()))
    return lambda: compression.reduce(names, bucket.gradients), lambda: compression.after_step(optimizer)


@dataclass(frozen=True)
class Started:
    """What a step starts for one bucket, in order: "triton:<kernel>", "NCCL <collective>", or PyTorch's operation."""

    average: tuple[str, ...]
    commit: tuple[str, ...]


def launches(
    method: str, exchange: str, ranks: int, recorded: bool = True, views: bool = False, **more: Any
) -> Started:
    """Count a bucket of a step in the middle of training.

    Args:
        method: see ``averaging``.
        exchange: see ``averaging``.
        ranks: see ``averaging``.
        recorded: a step is made again from what an earlier one recorded.
        views: list what starts nothing, too.
        **more: see ``averaging``.
    """
    log: list[str] = []
    parts: list[tuple[str, ...]] = []
    with _without_a_gpu(log), mock.patch.object(programs, "MOST", programs.MOST * recorded):
        work = averaging(method, exchange, ranks, log, torch.device("meta"), **more)
        for part in work * STEPS:
            log.clear()
            with _Operations(log, views):
                part()
            parts.append(tuple(log))
    return Started(*parts[-2:])


class Calls(NamedTuple):
    """Calls of functions of Python and of C, by which a bucket is averaged."""

    python: int
    c: int


def calls(method: str, exchange: str, ranks: int, device: str = "meta", recorded: bool = True, **more: Any) -> Calls:
    """Count the calls by which a bucket is averaged on one of so many ranks; see ``launches``."""
    log: list[str] = []
    found = {"call": 0, "c_call": 0}
    with _without_a_gpu(log), mock.patch.object(programs, "MOST", programs.MOST * recorded):
        average, commit = averaging(method, exchange, ranks, log, torch.device(device), **more)
        stubs = {vars(Tensor)["data_ptr"].__code__} if device == "meta" else set()

        def watch(frame: Any, event: str, argument: object) -> None:
            if event in found and frame.f_code not in stubs:  # which stands for a function of C that ``map`` calls
                found[event] += 1

        for step in range(STEPS):
            sys.setprofile(watch if step == STEPS - 1 else None)
            average()
            sys.setprofile(None)
            commit()
    return Calls(found["call"], found["c_call"])
