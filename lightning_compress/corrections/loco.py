"""LoCo: error feedback by a moving average of the errors, kept in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core import blocks
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.core.state import State, StateSpec
from lightning_compress.core.vector import Stage, Vector


@dataclass(frozen=True)
class LoCo:
    """Error feedback that adds a moving average of the errors to the gradient, not the last error.

    On every rank, with the gradient g and the error e, which is 0 at first and again every ``reset_every`` steps::

        h = g + e;   send q = C(h);   e <- (1 - beta) e + beta (h - q)

    Classical error feedback (``e <- h - q``) sends the whole error in the next step, and Adam takes that for variance
    of the gradient. LoCo sends the share ``beta`` of an error in the next step and less in each later step, so the late
    part arrives smoothly. Each step is conserved, but not the sum of steps: with each rank's
    ``r = (e_after - (1 - beta) e) / beta``, ``W * mean + sum(r) == sum(g + e)``, up to the rounding of e.

    The error is kept as 8-bit codes with a power of two per block of 64 (``core/blocks.py``), rounded to nearest.
    State: ``loco``, with its second buffer 2.03 bytes per parameter. Sums at owners travel with at least 4 bits,
    whatever the codec is, because this feedback does not bring back what encoding a sum loses (``Section.precise``).
    ``sums="same"`` in the exchange disables that.

    Args:
        beta: weight of the last error in the average, in (0, 1]. A smaller beta is smoother and forgets later.
        reset_every: number of steps after which all errors are set to 0, counted over all optimizers; None for never.

    Raises:
        ValueError: a setting is out of range.

    Xie, Lin, Toh, Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", arXiv 2407.04480. The
    8-bit format and the default of ``reset_every`` are ours.
    """

    name: ClassVar[str] = "loco"
    beta: float = 0.05
    reset_every: int | None = 512

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 0 < self.beta <= 1:
            raise ValueError(f"LoCo(beta={self.beta!r}): beta must be in (0, 1]; try 0.05")
        every = self.reset_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(
                f"LoCo(reset_every={every!r}): reset_every must be an integer, at least 1, or null for never"
            )

    @staticmethod
    def state(segments: Sequence[Segment]) -> StateSpec:
        """Declare the state: the coded errors of these parameters."""
        layout = Layout.of((segment.name, (blocks.coded_bytes(segment.numel),)) for segment in segments)
        return StateSpec(layout, dtype=torch.uint8)

    def fresh(self, step: int) -> bool:
        """Return True if the errors are reset to 0 in this step."""
        return self.reset_every is not None and step % self.reset_every == 0


class LoCoPlan(Stage):
    """LoCo for one group.

    Args:
        settings: settings of the method.
        layout: layout of the group's vectors.
        state: the state that ``LoCo.state`` declared.
        alone: the group has no other residual.
    """

    def __init__(self, settings: LoCo, layout: Layout, state: State, alone: bool) -> None:
        self._settings, self._state, self._alone = settings, state, alone
        coded = {segment.name: segment.span for segment in state.layout.segments}
        self._segments = [segment for segment in layout.segments if segment.numel]
        self._coded = [coded.get(segment.name) for segment in self._segments]
        device = state.committed.device
        self._fuses = alone and device.type == "cpu" and kernels.compiler(device) != "triton"

    def before(self, vector: Vector) -> None:
        """Add the errors to the gradients, except for parameters that are sent dense."""
        if vector.raw and self._fuses and self._add_in_one_pass(vector):
            return
        gradient, base = vector.whole(), self._state.base()
        for segment, place in zip(self._segments, self._coded, strict=True):
            if place is not None and self._has_errors(segment, vector):
                blocks.add(base[place], gradient[segment.span])

    def _add_in_one_pass(self, vector: Vector) -> bool:
        """Write gradients plus errors to ``vector.sent``; return False if a gradient is all zeros or not finite."""
        if vector.pieces[0].dtype != torch.float32:
            return False
        base, sent = self._state.base(), vector.take("mean")
        for segment, place, gradient in zip(self._segments, self._coded, vector.pieces, strict=True):
            out = sent[segment.span]
            if place is None or not self._has_errors(segment, vector):
                largest = int(out.copy_(gradient).abs().view(torch.int32).max())
            else:
                largest = blocks.add_to(base[place], gradient, out)
            if not kernels.sound(largest):
                return False
        vector.sent, vector.sound = sent, True
        return True

    def after(self, vector: Vector) -> None:
        """Update the errors by what was not sent."""
        sent = vector.made()
        old, new, beta = self._state.base(), self._state.pending, self._settings.beta
        for segment, place in zip(self._segments, self._coded, strict=True):
            if place is None:
                continue
            if not vector.sends_all(segment.span):
                decay = 0.0 if self._resets(segment, vector.step) else 1.0 - beta
                blocks.blend(old[place], decay, sent[segment.span], beta, new[place])
            elif new is not old:
                new[place] = old[place]
            if not self._alone:
                sent[segment.span] = 0.0

    def norm(self) -> Tensor:
        """Return the norm of the committed errors, a scalar."""
        coded = self._state.committed
        places = [place for place in self._coded if place is not None]
        norms = [blocks.decode(coded[place]).norm(dtype=torch.float64) for place in places]
        return torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float32, device=coded.device)

    def _has_errors(self, segment: Segment, vector: Vector) -> bool:
        return not vector.sends_all(segment.span) and not self._resets(segment, vector.step)

    def _resets(self, segment: Segment, step: int) -> bool:
        """Return True if a parameter's errors are reset in this step, and this is the step's first backward pass."""
        return self._settings.fresh(step) and segment.name not in self._state.touched
