"""What makes a step safe, and what an average costs a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._gpu.echo import EchoCollective, compress
from lightning_compress.collectives import TorchCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.drift import DriftGuard
from lightning_compress.engine.group import Group
from lightning_compress.engine.unused import Unused
from lightning_compress.planning.choose import Auto
from lightning_compress.settings.run_state import RunState

AVERAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "rotated, 2 ranks": (2, {"compressor": "rotated", "exchange": "all_gather"}),
    "rotated, 4 ranks": (4, {"compressor": "rotated", "exchange": "two_shot"}),
    "onebit, 2 ranks": (2, {"compressor": "onebit", "exchange": "all_gather"}),
    "onebit, 4 ranks": (4, {"compressor": "onebit", "exchange": "two_shot"}),
    "onebit, LoCo, 2 ranks": (2, {"compressor": "onebit", "exchange": "all_gather", "error_feedback": "loco"}),
    "onebit, LoCo, 4 ranks": (4, {"compressor": "onebit", "exchange": "two_shot", "error_feedback": "loco"}),
    "topk 1 %, 2 ranks": (2, {"compressor": {"name": "topk", "density": 0.01}, "exchange": "all_gather"}),
    "topk 1 %, 4 ranks": (4, {"compressor": {"name": "topk", "density": 0.01}, "exchange": "all_gather"}),
}
"""Ranks and settings whose computing is counted in copies."""
ROWS, COLUMNS, MATRICES, REPEATS = 250, 1000, 50, 15
"""What is averaged then."""


def hooked(module: nn.Module, compressor: str, sample_every: int = 0, **settings: Any) -> DistributedDataParallel:
    """A model whose gradients go through the hook, also where ``attach`` would leave them to DDP."""
    model = DistributedDataParallel(module)
    chosen = RunState.of(compressor, Auto(fallback="never"), **settings)
    compression = compress(model, chosen, TorchCollective(), torch.optim.SGD(model.parameters(), 0.01))
    compression.meter.sample_every = sample_every
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    """Milliseconds of one training step, begun together on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    return 1e3 * (time.perf_counter() - start)


class Clock:
    """Milliseconds spent in methods of the package, in all."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def watch(self, name: str, owner: type, method: str) -> None:
        """Time every call from now on."""
        inner = getattr(owner, method)

        def timed(*arguments: object) -> object:
            start = time.perf_counter()
            result = inner(*arguments)
            self.spent[name] = self.spent.get(name, 0.0) + 1e3 * (time.perf_counter() - start)
            return result

        setattr(owner, method, timed)


def safety(steps: int, module: nn.Module, inputs: torch.Tensor) -> dict[str, float]:
    """Milliseconds of a step with onebit, and of what makes it safe; the guard looks in every step."""
    model = hooked(module, "onebit", check_drift_every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        step(model, optimizer, inputs)
    clock = Clock()
    for method in ("remember", "before", "after", "restore"):
        clock.watch("unused", Unused, method)
    clock.watch("commit", Compression, "after_step")
    clock.watch("guard", DriftGuard, "record")
    clock.watch("guard", DriftGuard, "compare")
    total = sum(step(model, optimizer, inputs) for _ in range(steps))
    return {"step": total / steps} | {name: spent / steps for name, spent in clock.spent.items()}


def copies() -> dict[str, float]:
    """One core's time for an average and its commit, by method, over that of a copy of the gradients."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    shapes = [(f"matrix {number}", (ROWS, COLUMNS)) for number in range(MATRICES)]
    random = torch.Generator().manual_seed(0)
    source = torch.randn(MATRICES, ROWS * COLUMNS, generator=random)
    gradients = torch.empty_like(source)
    groups = {}
    for name, (ranks, given) in AVERAGES.items():
        settings = RunState.of(schedule="none", **given)
        meter = Meter(cpu)
        meter.sample_every = 0
        groups[name] = Group(shapes, settings, World(EchoCollective(ranks), cpu, meter), unused=False)
    seconds: dict[str, list[float]] = {name: [] for name in ["copy", *groups]}
    for step in range(1 + REPEATS):  # the first one compiles
        seconds["copy"].append(_core_seconds(gradients.copy_, source))
        for name, group in groups.items():
            gradients.copy_(source)
            seconds[name].append(_core_seconds(_average, group, gradients, step))
    least = {name: min(each[1:]) for name, each in seconds.items()}
    return {name: least[name] / least["copy"] for name in groups}


def _average(group: Group, gradients: torch.Tensor, step: int) -> None:
    flag = group.reduce(gradients.unbind(), step, None)
    for state in group.states.values():
        state.commit(flag.isnan(), group.names)


def _core_seconds(work: Callable[..., object], *arguments: Any) -> float:
    start = time.thread_time()
    work(*arguments)
    return time.thread_time() - start
