"""A group on ranks that are threads, taken through steps as the hook would."""

from __future__ import annotations

import torch

from lightning_compress.collectives import LocalCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine.group import Group
from lightning_compress.settings.run_state import RunState

CPU = torch.device("cpu")
SOUND = torch.tensor(False)
PARAMETERS = [("conv", (16, 9, 9, 3)), ("bias", (37,)), ("linear", (101, 67)), ("tiny", (3, 5))]
LENGTHS = [16 * 9 * 9 * 3, 37, 101 * 67, 15]
NAMES = [name for name, _ in PARAMETERS]
COMPRESSED = ["conv", "linear"]


def gradient(rank, step, kind="normal"):
    """Different on every rank and in every step: a flat vector in the order of ``PARAMETERS``."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    values = torch.randn(sum(LENGTHS), generator=generator)
    return values if kind == "normal" else values * torch.rand(sum(LENGTHS), generator=generator).square()


def named(vector):
    """Parts of a flat vector by the parameter's name."""
    return dict(zip(NAMES, vector.split(LENGTHS), strict=True))


class Walker:
    """One rank's group.

    Attributes:
        vectors: what the exchange was given, and left, step by step, by name.
    """

    def __init__(self, collective, compressor, **settings):
        settings = RunState.of(compressor, **settings)
        self.meter = Meter(CPU)
        self.group = Group(PARAMETERS, settings, World(collective, CPU, self.meter))

    def reduce(self, values, step, scale=None):
        """What the optimizer is given for a flat gradient, as a flat vector."""
        parts = [part.clone() for part in values.split(LENGTHS)]
        self.group.reduce(parts, step, scale)
        return torch.cat(parts)

    def commit(self, names=NAMES):
        for state in self.group.states.values():
            state.commit(SOUND, names)

    def roll_back(self):
        for state in self.group.states.values():
            state.roll_back()

    def state(self, name):
        """Committed numbers by the parameter's name."""
        state = self.group.states[name]
        return {each.name: state.committed[each.offset : each.end].clone() for each in state.layout.segments}


def on_ranks(size, program):
    """``program(collective)`` on every rank."""
    return [program(LocalCollective())] if size == 1 else run_threads(size, program)


def walk(size, compressor, steps, gradients=gradient, **settings):
    """Take every rank through some steps; what the optimizer gets in each, and the walkers."""

    def program(collective):
        walker = Walker(collective, compressor, **settings)
        out = []
        for step in range(steps):
            out.append(walker.reduce(gradients(collective.rank, step), step))
            walker.commit()
        return out, walker

    ranks = on_ranks(size, program)
    for out, _ in ranks[1:]:
        assert all(mine.equal(first) for mine, first in zip(out, ranks[0][0], strict=True))
    return ranks[0][0], [walker for _, walker in ranks]
