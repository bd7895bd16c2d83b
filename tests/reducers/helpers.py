"""Reducers on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_compress.collectives import Collective, CountingCollective, LocalCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.reducers import Reducer

CPU = torch.device("cpu")


@dataclass
class Trip:
    """What one rank saw of one mean."""

    before: torch.Tensor
    after: torch.Tensor
    mean: torch.Tensor
    carried: torch.Tensor
    sent: int
    promised: int


def trips(
    reducer: Reducer, layout: Layout, vectors: Callable[[int], list[torch.Tensor]], ranks: int, carried: int = 3
) -> list[list[Trip]]:
    """On every rank, one mean after the other of its vectors, each step committed."""

    def program(collective: Collective) -> list[Trip]:
        meter = Meter(CPU)
        states = {n: State(each.layout, CPU, each.initial, each.holder) for n, each in reducer.state(layout).items()}
        plan = reducer.plan(layout, carried, World(CountingCollective(collective, meter), CPU, meter), states)
        done: list[Trip] = []
        for key, before in enumerate(vectors(collective.rank)):
            after, mean = before.clone(), torch.full_like(before, torch.nan)
            floats = torch.full((carried,), collective.rank + 0.5)
            start = meter.bytes_sent
            plan.mean(after, mean, floats, key)
            done.append(Trip(before, after, mean, floats, meter.bytes_sent - start, plan.bytes_sent))
            for state in states.values():
                state.touch()
                state.commit(torch.tensor(False), layout.names)
        return done

    return [program(LocalCollective())] if ranks == 1 else run_threads(ranks, program)
