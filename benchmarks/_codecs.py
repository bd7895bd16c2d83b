"""What the benchmarks of codecs measure, on a CPU and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.codecs import CODECS, Codec, TopK
from lightning_compress.codecs.base import Plan
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.corrections import CORRECTED, Corrected

Case = Codec | Corrected

CASES: dict[str, Case] = {name: codec() for name, codec in CODECS.items()}
CASES["topk-exact"] = TopK(selection="exact")
CASES |= {name: corrected() for name, corrected in CORRECTED.items()}


def plan_of(case: Case, layout: Layout, device: torch.device) -> Plan:
    """The plan of a codec, or one that corrects before it encodes."""
    return CorrectedPlan(case, layout, device) if isinstance(case, Corrected) else case.plan(layout, device)


class CorrectedPlan(Plan):
    """A correction around its codec: encoding includes what it does before and after."""

    def __init__(self, corrected: Corrected, layout: Layout, device: torch.device) -> None:
        super().__init__(layout)
        whole, correction = [slice(0, layout.numel)], corrected.correction
        states = {
            name: State(each.layout, device, each.initial, each.holder)
            for name, each in correction.state(layout, whole).items()
        }
        self._whole, self._states = whole, states
        self._correction = correction.plan(layout, whole, 2, device, states)
        self._plan = corrected.codec.plan(layout, device)
        self._mean, self._step = torch.zeros(layout.numel, device=device), 1 << 20
        self.message_size = self._plan.message_size

    def share(self, key: int) -> None:
        """See the base class."""
        self._plan.share(key)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See the base class; the vector is corrected first."""
        self._correction.before(vector, self._whole, self._step)
        self._plan.encode(vector, message, key)
        self._finish(vector)

    def encode_sum(self, gradient: Tensor, residual: Tensor, vector: Tensor, message: Tensor, key: int) -> None:
        """See the base class; the gradient is corrected first, in place."""
        self._correction.before(gradient, self._whole, self._step)
        self._plan.encode_sum(gradient, residual, vector, message, key)
        self._finish(vector)

    def _finish(self, vector: Tensor) -> None:
        self._correction.after(self._mean, vector, self._whole, self._step)
        for state in self._states.values():
            state.committed, state.pending = state.pending, state.committed

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See the base class."""
        self._plan.decode(messages, out, weight, accumulate)
