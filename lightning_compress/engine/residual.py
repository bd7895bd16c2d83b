"""Stages that feed back what encoding did not send, as it was in the step before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_compress.codecs.cast import StochasticRounding
from lightning_compress.core.random import mix
from lightning_compress.core.source import Source
from lightning_compress.core.state import State
from lightning_compress.core.vector import Stage, Vector


class ErrorFeedback(Stage):
    """Add the residual to the gradients; what is not sent becomes the next residual, in the same memory.

    Args:
        residual: the state that holds it.
        decay: factor of the old residual, once per step.

    Attributes:
        plain: in a step's first pass, whoever encodes adds the residual as it is.
    """

    def __init__(self, residual: State, decay: float) -> None:
        self._residual, self._decay = residual, decay
        self._halved = residual.committed.dtype != torch.float32
        self.plain = decay == 1 and not self._halved

    def phase(self, step: int) -> tuple[()]:
        """See ``Stage``."""
        return ()

    def before(self, vector: Vector) -> None:
        """See ``Stage``."""
        residual, decay = self._residual, self._decay
        if vector.source is not None:  # the correction has added the residual
            return
        if residual.touched and decay != 1:  # a later pass: decay only the parameters whose step begins with it
            residual.decay(decay)
            decay = 1.0
        rest = vector.take("mean") if self._halved else residual.pending
        if self._halved or residual.touched or decay != 1:
            torch.add(vector.whole(), residual.base(), alpha=decay, out=rest)
            vector.source, vector.rest = Source(rest), rest
        else:
            vector.send(rest, residual.committed)


class KeptErrors(Stage):
    """Reduce the residual: round it to its dtype, or drop the part that is noise.

    Args:
        residual: the state that holds it; if it is not float32, values are rounded to it stochastically.
        noise: slices without a residual, because an unbiased method's error is noise.
        rank: of this process.
    """

    def __init__(self, residual: State, noise: Sequence[slice], rank: int) -> None:
        self._residual, self._noise, self._rank = residual, noise, rank
        device, halved = residual.committed.device, residual.committed.dtype != torch.float32
        self._rounding = StochasticRounding(residual.layout.numel, device) if halved else None

    def phase(self, step: int) -> tuple[()]:
        """See ``Stage``."""
        return ()

    def after(self, vector: Vector) -> None:
        """See ``Stage``."""
        for place in self._noise:
            vector.rest[place].zero_()
        if self._rounding:
            self._rounding.round(vector.rest, self._residual.pending, mix(*vector.draws, self._rank))
