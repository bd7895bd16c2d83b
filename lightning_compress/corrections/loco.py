"""LoCo: error feedback by a slow average of the errors, in 8 bits."""

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
    """Add an average of the errors so far to the gradient, not the last error itself.

    On every rank, with the error e, which is 0 at first and after every ``reset_every`` steps::

        h = g + e;   send q = C(h);   e <- (1 - beta) e + beta (h - q)

    Classical error feedback (``e <- h - q``) sends an error in full in the next step, where Adam takes it for variance
    of the gradient. This one sends, of a single error, ``beta`` in the next step and less in each one after, so that
    what arrives late arrives smoothly. Conserved is what each step does, not their sum: with all ranks'
    ``r = (e_after - (1 - beta) e) / beta``, ``W * mean + sum(r) == sum(g + e)`` to the rounding of e.

    The error is kept in 8 bits: codes with a power of two for 64 of them (``core/blocks.py``), rounded to the nearest.
    State: ``loco``, with its second buffer 2.03 bytes a parameter. Sums at owners travel in 4 bits or more, whatever
    the codec, since this feedback would not bring back what their encoding leaves (``Section.precise``), unless the
    exchange is told ``sums="same"``.

    Args:
        beta: share of the last error in the average, in (0, 1]; smaller is smoother and forgets later.
        reset_every: steps of the run after which all errors begin at 0 again, whichever optimizer took them; or None
            for never.

    Raises:
        ValueError: a setting is out of range.

    Xie, Lin, Toh, Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", arXiv 2407.04480. The
    8-bit format here is not theirs, and neither is ``reset_every``'s default.
    """

    name: ClassVar[str] = "loco"
    beta: float = 0.05
    reset_every: int | None = 512

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 0 < self.beta <= 1:
            raise ValueError(f"LoCo(beta={self.beta!r}): beta must be in (0, 1]; try 0.05")
        every = self.reset_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"LoCo(reset_every={every!r}): it must be a number of steps, 1 or more, or null for never")

    @staticmethod
    def state(segments: Sequence[Segment]) -> StateSpec:
        """The errors of these parameters, coded."""
        layout = Layout.of((each.name, (blocks.coded_bytes(each.numel),)) for each in segments)
        return StateSpec(layout, dtype=torch.uint8)

    def fresh(self, step: int) -> bool:
        """Whether the error begins at 0 in this step."""
        return self.reset_every is not None and step % self.reset_every == 0


class LoCoPlan(Stage):
    """The errors of one group.

    Args:
        settings: of the method.
        layout: of the group's vectors.
        state: what ``LoCo.state`` declared.
        alone: no residual is added afterwards, nor kept.
    """

    def __init__(self, settings: LoCo, layout: Layout, state: State, alone: bool) -> None:
        self._settings, self._state, self._alone = settings, state, alone
        coded = {segment.name: segment.span for segment in state.layout.segments}
        self._segments = [each for each in layout.segments if each.numel]
        self._coded = [coded.get(each.name) for each in self._segments]
        device = state.committed.device
        self._feeds = alone and device.type == "cpu" and kernels.compiler(device) != "triton"

    def before(self, vector: Vector) -> None:
        """Add the errors, but those of what is sent as it is."""
        if vector.raw and self._feeds and self._fed(vector):
            return
        gradient, base = vector.whole(), self._state.base()
        for segment, place in zip(self._segments, self._coded, strict=True):
            if place is not None and self._has_errors(segment, vector):
                blocks.add(base[place], gradient[segment.span])

    def _fed(self, vector: Vector) -> bool:
        """Write gradients and errors to what is sent in one pass; not of gradients that are all zeros."""
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
        """Take what was not sent into the errors."""
        sent = vector.made()
        old, new, beta = self._state.base(), self._state.pending, self._settings.beta
        for segment, place in zip(self._segments, self._coded, strict=True):
            if place is None:
                continue
            if not vector.sends_all(segment.span):
                kept = 0.0 if self._begins(segment, vector.step) else 1.0 - beta
                blocks.blend(old[place], kept, sent[segment.span], beta, new[place])
            elif new is not old:
                new[place] = old[place]
            if not self._alone:
                sent[segment.span] = 0.0

    def norm(self) -> Tensor:
        """Of the committed errors: a scalar."""
        coded = self._state.committed
        places = [place for place in self._coded if place is not None]
        norms = [blocks.decode(coded[place]).norm(dtype=torch.float64) for place in places]
        return torch.stack(norms).norm() if norms else torch.zeros((), device=coded.device)

    def _has_errors(self, segment: Segment, vector: Vector) -> bool:
        return not vector.sends_all(segment.span) and not self._begins(segment, vector.step)

    def _begins(self, segment: Segment, step: int) -> bool:
        """Whether the errors of a parameter begin at 0, and there is no pass of this step before."""
        return self._settings.fresh(step) and segment.name not in self._state.touched
