"""EF21 with momentum: what is compressed is how far an estimate is from the momentum, not the gradient."""

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
    """An estimate of every rank's momentum, and their mean; see ``EF21``, which checks the settings."""

    replaces_residual: ClassVar[bool] = True
    eta: float

    def state(self, layout: Layout, compressed: Sequence[slice]) -> Mapping[str, StateSpec]:
        """``momentum`` and ``estimate`` of each rank, and ``mean``, that of all estimates."""
        return {"momentum": StateSpec(layout), "estimate": StateSpec(layout), "mean": StateSpec(layout, "shared")}

    def plan(
        self, layout: Layout, compressed: Sequence[slice], world: World, states: States, residual: State | None
    ) -> CorrectionPlan:
        """See ``Correction.plan``."""
        return _Plan(self, layout, world.device, states)

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """Any optimizer will do."""
        return None


@dataclass(frozen=True)
class EF21(Corrected):
    """Send what an estimate of the momentum lacks; the optimizer is given the mean of the estimates.

    On every rank, with a momentum v and an estimate s of it, which begin at 0 (v at the first gradient)::

        v <- (1 - eta) v + eta g;   send c = C(v - s);   s <- s + c

    and on all of them ``S <- S + mean(c)``, which is the mean of the s, and what the optimizer is given in place of the
    mean of gradients. Nothing piles up: what was not sent of a gradient is not sent later, but the estimate goes after
    the momentum. So no residual is kept, and the mean of gradients is not conserved; what is, in every step, is
    ``W * S == sum(s)``. For a constant gradient S comes as close as the codec contracts. Small, 1-D and excluded
    parameters go the same way, but travel as float32, so that their s is v.

    S changes slowly, as momentum does: an optimizer with momentum of its own has then both, and may want less of it.
    A Trainer's ``gradient_clip_val`` is refused, since S is no mean of gradients: clip with ``local_clip_norm``.

    Bits per element: those of the codec. State: ``momentum``, ``estimate`` and ``mean``, float32; with their second
    buffers 24 bytes per parameter.

    Args:
        eta: share of a gradient in the momentum, in (0, 1]; 1 is EF21 without momentum.
        quantiser: what compresses, by name, mapping or object: a codec that is biased (``onebit``, ``topk``, ...), or
            "none"; ``OneBit()`` if None.

    Raises:
        ValueError: a setting is out of range, or the codec is unbiased: those are for gradients as such.

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
                f"EF21(quantiser={codec}): it needs a method that always comes closer, such as 'onebit' or 'topk', and "
                "this one is right on average only; use it as the compressor itself"
            )
        object.__setattr__(self, "quantiser", codec)  # frozen; equal settings are equal, however they were given

    @property
    def codec(self) -> Codec:
        """What compresses."""
        return cast(Codec | None, self.quantiser) or OneBit()

    @property
    def correction(self) -> EstimateCorrection:
        """The estimates."""
        return EstimateCorrection(self.eta)


class _Plan(CorrectionPlan):
    def __init__(self, settings: EstimateCorrection, layout: Layout, device: torch.device, states: States) -> None:
        self._eta = settings.eta
        self._momentum, self._estimate, self._mean = (states[name] for name in ("momentum", "estimate", "mean"))
        self._chunk = chunk_size(device)

    def before(self, vector: Vector) -> None:
        # not base(): a step has one momentum, however many backwards it takes to come to it
        eta, gradient = self._eta if vector.step else 1.0, vector.whole()
        for piece in pieces(len(gradient), self._chunk):
            momentum = self._momentum.pending[piece]
            torch.mul(self._momentum.committed[piece], 1 - eta, out=momentum).add_(gradient[piece].mul_(eta))
            torch.sub(momentum, self._estimate.committed[piece], out=gradient[piece])

    def after(self, vector: Vector) -> None:
        sent = vector.made()
        for piece, mean in vector.stretches(self._chunk):
            torch.sub(self._momentum.pending[piece], sent[piece], out=self._estimate.pending[piece])
            torch.add(self._mean.committed[piece], mean, out=self._mean.pending[piece])
            mean.copy_(self._mean.pending[piece])
