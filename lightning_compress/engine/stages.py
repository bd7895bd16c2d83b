"""What happens to a group's gradients before and after they are averaged, for its states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.cast import StochasticRounding
from lightning_compress.core.random import mix
from lightning_compress.core.state import State
from lightning_compress.core.vector import Stage, Vector


class Unscale(Stage):
    """Divide gradients by the loss scale, because states outlive the scale of their step."""

    def __init__(self) -> None:
        self._inverse: Tensor | None = None

    def before(self, vector: Vector) -> None:
        """See ``Stage``."""
        assert vector.scale is not None
        if self._inverse is None:
            self._inverse = torch.empty_like(vector.scale)
        vector.whole().mul_(torch.reciprocal(vector.scale, out=self._inverse))

    def after(self, vector: Vector) -> None:
        """See ``Stage``."""
        assert vector.scale is not None
        torch._foreach_mul_(vector.means, vector.scale)


class ErrorFeedback(Stage):
    """Add the residual to the gradients; what is not sent becomes the next residual, in the same memory.

    Args:
        residual: the state that holds it.
        decay: factor of the old residual, once per step.
    """

    def __init__(self, residual: State, decay: float) -> None:
        self._residual, self._decay = residual, decay
        device, self._halved = residual.committed.device, residual.committed.dtype != torch.float32
        self._fuses = not self._halved and kernels.compiler(device) == "triton"
        self._feeds = not self._halved and not self._fuses and device.type == "cpu"

    def phase(self, step: int) -> tuple[()]:
        """See ``Stage``."""
        return ()

    def before(self, vector: Vector) -> None:
        """See ``Stage``."""
        residual, decay = self._residual, self._decay
        if vector.sent is not None:  # the correction has added the residual
            return
        untouched, kept = not residual.touched, (residual.committed, residual.pending)
        if self._feeds and untouched and vector.add(*kept, decay):
            return
        gradient = vector.whole()
        if not untouched and decay != 1:  # a later pass: decay only the parameters whose step begins with it
            residual.decay(decay)
            decay = 1.0
        vector.sent = vector.take("mean") if self._halved else residual.pending
        if self._fuses and untouched and decay == 1:
            vector.summands = gradient, residual.committed
        else:
            torch.add(gradient, residual.base(), alpha=decay, out=vector.sent)


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
        sent = vector.made()
        for place in self._noise:
            sent[place].zero_()
        if self._rounding:
            self._rounding.round(sent, self._residual.pending, mix(*vector.draws, self._rank))
