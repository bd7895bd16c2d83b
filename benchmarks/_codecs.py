"""What the benchmarks of codecs measure, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_compress.codecs import CODECS, QSGD, Codec, TopK
from lightning_compress.codecs.codec import Plan, SourcePlan
from lightning_compress.codecs.spectral.spectrum import FUSED_CHUNK, Spectral
from lightning_compress.collectives import LocalCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Memory, Source
from lightning_compress.core.state import State
from lightning_compress.core.vector import Vector
from lightning_compress.corrections import CORRECTED, Corrected

Case = Codec | Corrected

CASES: dict[str, Case] = {name: codec() for name, codec in CODECS.items()}
CASES["topk-exact"] = TopK(selection="exact")
ON_CPUS: dict[str, Case] = {"qsgd-entropy": QSGD(coding="entropy"), "qsgd-entropy-5": QSGD(5, coding="entropy")}
CASES |= {name: corrected() for name, corrected in CORRECTED.items()}


def plan_of(case: Case, layout: Layout, device: torch.device) -> Plan:
    """The plan of a codec, or one that corrects before it encodes."""
    return CorrectedPlan(case, layout, device) if isinstance(case, Corrected) else case.plan(layout, device)


def transforms_of(case: Case, numel: int) -> dict[str, Callable[[], object]]:
    """What a spectral codec transforms of a vector, in its plan's pieces, as functions by name; nothing of others."""
    if not isinstance(case, Spectral):
        return {}
    transform = case.transform(case.block)
    rows = torch.zeros(max(8, FUSED_CHUNK // (case.block + 2) // 8 * 8), case.block)
    spectrum = torch.zeros(len(rows), transform.bins, transform.width)
    parts = range(-(-numel // rows.numel()))
    return {
        "forward": lambda: [transform.forward(rows, spectrum) for _ in parts],
        "inverse": lambda: [transform.inverse(spectrum, rows) for _ in parts],
    }


class CorrectedPlan(SourcePlan):
    """A correction around its codec: encoding includes what it does before and after."""

    def __init__(self, corrected: Corrected, layout: Layout, device: torch.device) -> None:
        super().__init__(layout)
        whole, correction = [slice(0, layout.numel)], corrected.correction
        states = {
            name: State(each.layout, device, each.initial, each.holder)
            for name, each in correction.state(layout, whole).items()
        }
        self._states = states
        world = World(LocalCollective(), device, Meter(device))
        self._correction = correction.plan(layout, whole, world, states, None)
        self._plan = corrected.codec.plan(layout, device)
        self._means = torch.zeros(layout.numel, device=device)
        self.message_size = self._plan.message_size

    def share(self, key: int) -> None:
        """See the base class."""
        self._plan.share(key)

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See the base class; the gradient, without what is added to it, is corrected first."""
        given = Vector(Memory([source.values], fast=False), 1 << 20)
        given.gradient, given.means = given.pieces[0], [self._means]
        self._correction.before(given)
        self._plan.encode_from(source, rest, message, key)
        given.rest = source.spare if rest is None else rest
        self._correction.after(given)
        for state in self._states.values():
            state.committed, state.pending = state.pending, state.committed

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See the base class."""
        self._plan.decode(messages, out, weight, accumulate)
