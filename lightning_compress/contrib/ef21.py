"""EF21 with momentum: compresses the difference of the momentum and an estimate of it, not the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch.optim import Optimizer

from lightning_compress.codecs import CODECS, Codec, Dense, OneBit
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout
from lightning_compress.core.registry import build
from lightning_compress.core.state import State, States, StateSpec
from lightning_compress.core.vector import Vector
from lightning_compress.core.workspace import chunk_size, pieces
from lightning_compress.corrections.correction import Corrected, Correction, CorrectionPlan

__all__ = ["EF21"]


@dataclass(frozen=True)
class EstimateCorrection(Correction):
    """Estimates of the ranks' momenta, and their mean; see ``EF21``, which checks the settings."""

    replaces_residual: ClassVar[bool] = True
    eta: float

    def state(self, layout: Layout, compressed: Sequence[slice]) -> Mapping[str, StateSpec]:
        """See ``Correction``: per-rank ``momentum`` and ``estimate``, and ``mean``, the mean of all estimates."""
        return {"momentum": StateSpec(layout), "estimate": StateSpec(layout), "mean": StateSpec(layout, "shared")}

    def plan(
        self, layout: Layout, compressed: Sequence[slice], world: World, states: States, residual: State | None
    ) -> CorrectionPlan:
        """See ``Correction.plan``."""
        return _Plan(self, layout, world.device, states)

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """See ``Correction``: any optimizer is allowed."""
        return None


@dataclass(frozen=True)
class EF21(Corrected):
    """Send the compressed difference of momentum and estimate; the optimizer gets the mean of the estimates.

    On every rank, with a momentum v that starts at the first gradient, and its estimate s that starts at 0::

        v <- (1 - eta) v + eta g;   send c = C(v - s);   s <- s + c

    On all ranks, ``S <- S + mean(c)`` is the mean of all s. The optimizer gets S instead of the mean of the gradients.
    Nothing accumulates: what is not sent of a gradient is not sent later; the estimate follows the momentum instead. So
    there is no residual, and the mean of the gradients is not conserved. ``W * S == sum(s)`` holds in every step. With
    a constant gradient, S converges to it at the contraction rate of the codec. Small, 1-D and excluded parameters are
    handled in the same way, but are sent as float32, so that their s equals v.

    S changes slowly, like momentum. An optimizer with its own momentum may need less of it. A Trainer's
    ``gradient_clip_val`` is refused, because S is not a mean of gradients; use ``local_clip_norm``.

    Bits per element: those of the codec. State: ``momentum``, ``estimate`` and ``mean``, float32; with their second
    buffers 24 bytes for each parameter.

    Args:
        eta: weight of a gradient in the momentum, in (0, 1]; 1 is EF21 without momentum.
        quantiser: the codec, by name, mapping or object: a biased one (``onebit``, ``topk``, ...), or "none". None
            stands for ``OneBit()``.

    Raises:
        ValueError: a setting is out of range, or the codec is unbiased; EF21 needs a contractive one.

    Fatkhullin, Tyurin, Richtarik, "Momentum Provably Improves Error Feedback!", NeurIPS 2023, arXiv 2305.15155.
    Richtarik, Sokolov, Fatkhullin, "EF21", NeurIPS 2021.
    """

    eta: float = 0.1
    quantiser: Codec | Mapping[str, object] | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.eta, bool) or not isinstance(self.eta, int | float) or not 0 < self.eta <= 1:
            raise ValueError(f"EF21(eta={self.eta!r}): eta must be in (0, 1]; try 0.1")
        if self.quantiser is None:
            return
        codec = build("quantiser", self.quantiser, CODECS, (Codec,))
        assert isinstance(codec, Codec)
        if not codec.contractive and not isinstance(codec, Dense):
            raise ValueError(
                f"EF21(quantiser={codec}): EF21 needs a contractive codec, such as 'onebit' or 'topk', and this one is "
                "only unbiased; use it as the compressor itself"
            )
        object.__setattr__(self, "quantiser", codec)  # frozen; equal settings are equal, however they were given

    @property
    def codec(self) -> Codec:
        """The codec, with the default resolved."""
        return cast(Codec | None, self.quantiser) or OneBit()

    @property
    def correction(self) -> EstimateCorrection:
        """See ``Corrected``."""
        return EstimateCorrection(self.eta)


class _Plan(CorrectionPlan):
    def __init__(self, settings: EstimateCorrection, layout: Layout, device: torch.device, states: States) -> None:
        self._eta = settings.eta
        self._momentum, self._estimate, self._mean = (states[name] for name in ("momentum", "estimate", "mean"))
        self._chunk = chunk_size(device)

    def before(self, vector: Vector) -> None:
        # not base(): a step has one momentum, however many backward passes it has
        eta, gradient = self._eta if vector.step else 1.0, vector.whole()
        for piece in pieces(len(gradient), self._chunk):
            momentum = self._momentum.pending[piece]
            torch.mul(self._momentum.committed[piece], 1 - eta, out=momentum).add_(gradient[piece].mul_(eta))
            torch.sub(momentum, self._estimate.committed[piece], out=gradient[piece])

    def after(self, vector: Vector) -> None:
        sent = vector.rest
        for piece, mean in vector.stretches(self._chunk):
            torch.sub(self._momentum.pending[piece], sent[piece], out=self._estimate.pending[piece])
            torch.add(self._mean.committed[piece], mean, out=self._mean.pending[piece])
            mean.copy_(self._mean.pending[piece])
