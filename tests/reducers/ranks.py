"""Reducers at work on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lightning_compress.collectives import Collective, CountingCollective, LocalCollective, World, run_threads
from lightning_compress.collectives.collective import Operation
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.reducers import Reducer

CPU = torch.device("cpu")
CARRIED = 7


@dataclass
class Rank:
    """What one rank has seen, step by step."""

    means: list[torch.Tensor] = field(default_factory=list)
    residuals: list[torch.Tensor] = field(default_factory=list)
    carried: list[torch.Tensor] = field(default_factory=list)
    states: dict[str, State] = field(default_factory=dict)
    committed: list[dict[str, torch.Tensor]] = field(default_factory=list)
    collectives: int = 0
    bytes_counted: int = 0
    bytes_promised: int = 0


class _Counted(CountingCollective):
    calls = 0

    def all_reduce(self, tensor: torch.Tensor, operation: Operation = "sum") -> None:
        self.calls += 1
        super().all_reduce(tensor, operation)


def gradient(layout: Layout, rank: int, step: int) -> torch.Tensor:
    """Other data on every rank and in every step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(layout.numel, generator=generator) * torch.rand(layout.numel, generator=generator).square()


def train(
    reducer: Reducer,
    layout: Layout,
    size: int,
    steps: int = 1,
    gradients: Callable[[int, int], torch.Tensor] | None = None,
    skipped: tuple[int, ...] = (),
) -> list[Rank]:
    """Average with error feedback; the skipped steps are rolled back."""

    def program(collective: Collective) -> Rank:
        meter, seen = Meter(CPU), Rank()
        counted = _Counted(collective, meter)
        seen.states = {
            name: State(each.layout, CPU, each.initial, each.holder) for name, each in reducer.state(layout).items()
        }
        plan = reducer.plan(layout, CARRIED, World(counted, CPU, meter), seen.states)
        residual, none = torch.zeros(layout.numel), torch.tensor(False)
        for step in range(steps):
            vector = residual + (gradients or (lambda *at: gradient(layout, *at)))(collective.rank, step)
            mean, carried = torch.full_like(vector, 7.0), torch.arange(CARRIED) + float(collective.rank)
            plan.mean(vector, mean, carried, 1000 + step)
            for state in seen.states.values():
                state.touch()
                state.roll_back() if step in skipped else state.commit(none, state.layout.names)
            if step not in skipped:
                residual = vector
            seen.means.append(mean)
            seen.residuals.append(vector.clone())
            seen.carried.append(carried)
            seen.committed.append({name: state.committed.clone() for name, state in seen.states.items()})
        seen.collectives, seen.bytes_counted, seen.bytes_promised = counted.calls, meter.bytes_sent, plan.bytes_sent
        return seen

    return [program(LocalCollective())] if size == 1 else run_threads(size, program)
