"""LoCo: error feedback by a moving average of the errors, kept in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.core import blocks
from lightning_compress.core.blocks import Segments
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.core.state import State, StateSpec
from lightning_compress.core.told import Bits
from lightning_compress.core.vector import Stage, Vector


@dataclass(frozen=True)
class LoCo:
    """Error feedback that adds a moving average of the errors to the gradient, not the last error.

    On every rank, with the gradient g and the error e, which is 0 at first and again every ``reset_every`` steps::

        h = g + e;   send q = C(h);   e <- (decay - beta) e + beta (h - q)

    Classical error feedback (``e <- h - q``) sends the whole error in the next step, and Adam takes that for variance
    of the gradient. LoCo sends the share ``beta`` of an error in the next step and less in each later step, so the late
    part arrives smoothly. Each step is conserved, but not the sum of steps: with each rank's
    ``r = (e_after - (decay - beta) e) / beta``, ``W * mean + sum(r) == sum(g + e)``, up to the rounding of e.

    The error is kept as 8-bit codes with a power of two per block of 64 (``core/blocks.py``), rounded to nearest.
    State: ``loco``, with its second buffer 2.03 bytes per parameter. Sums at owners travel with at least 4 bits,
    whatever the codec is, because this feedback does not bring back what encoding a sum loses (``Section.precise``).
    ``sums="same"`` in the exchange disables that.

    Args:
        beta: weight of the last error in the average, in (0, 1]. A smaller beta is smoother and forgets later.
        decay: factor for the errors of earlier steps, in [beta, 1]. LoCo has 1. Below 1 this is ECQ-SGD, whose alpha is
            our beta, and whose beta is our decay.
        reset_every: number of steps after which all errors are set to 0, counted over all optimizers; None for never.

    Raises:
        ValueError: a setting is out of range.

    Xie, Lin, Toh, Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", arXiv 2407.04480. The
    8-bit format and the default of ``reset_every`` are ours. ``decay``: Wu, Huang, Huang, Zhang, "Error Compensated
    Quantized SGD and its Applications to Large-scale Distributed Optimization", ICML 2018, arXiv 1806.08054.
    """

    name: ClassVar[str] = "loco"
    beta: float = 0.05
    reset_every: int | None = 512
    decay: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 0 < self.beta <= 1:
            raise ValueError(f"LoCo(beta={self.beta!r}): beta must be in (0, 1]; try 0.05")
        decay = self.decay
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not self.beta <= decay <= 1:
            raise ValueError(
                f"LoCo(beta={self.beta!r}, decay={decay!r}): decay must be in [beta, 1], or the average would change "
                "its sign; 1 forgets nothing"
            )
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
        starts = {segment.name: segment.offset for segment in state.layout.segments}
        self._segments = [segment for segment in layout.segments if segment.numel]
        self._coded = tuple(starts.get(segment.name, -1) for segment in self._segments)
        self._sizes = tuple(segment.numel for segment in self._segments)

    def phase(self, step: int) -> bool:
        """See ``Stage``."""
        return self._settings.fresh(step)

    def before(self, vector: Vector) -> None:
        """Add the errors to the gradients, except for parameters that are sent dense."""
        vector.add_errors(self._coded, self._treated(vector), self._state.base())

    def after(self, vector: Vector) -> None:
        """Update the errors by what was not sent: nothing of what no rank uses."""
        sent, beta, decay = vector.rest, self._settings.beta, self._settings.decay
        segments = Segments(vector.memory.starts, self._sizes, self._coded, self._treated(vector))
        bits = Bits.of(vector.rows, vector.told) if vector.rows else None
        blocks.blend(segments, self._state.base(), decay - beta, sent, beta, self._state.pending, bits)
        if not self._alone:
            for segment, code in zip(self._segments, self._coded, strict=True):
                if code >= 0:
                    sent[segment.span] = 0.0

    def _treated(self, vector: Vector) -> tuple[int, ...]:
        """Return what happens to the errors of each parameter in this step."""
        fresh, touched = self._settings.fresh(vector.step), self._state.touched
        if not vector.dense and not (fresh and touched):
            return (blocks.RESET if fresh else blocks.AVERAGE,) * len(self._segments)
        return tuple(
            blocks.KEEP
            if vector.sends_all(segment.span)
            else blocks.RESET
            if fresh and segment.name not in touched  # in the step's first backward pass
            else blocks.AVERAGE
            for segment in self._segments
        )

    def norm(self) -> Tensor:
        """Return the norm of the committed errors, a scalar."""
        coded = self._state.committed
        places = [segment.span for segment in self._state.layout.segments if segment.numel]
        norms = [blocks.decode(coded[place]).norm(dtype=torch.float64) for place in places]
        return torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float32, device=coded.device)
