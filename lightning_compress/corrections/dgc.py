"""Deep Gradient Compression: sparsifies the velocity of momentum SGD, not the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_compress import kernels
from lightning_compress.codecs import CODECS, Codec, TopK
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout
from lightning_compress.core.registry import build
from lightning_compress.core.source import Source
from lightning_compress.core.state import State, States, StateSpec
from lightning_compress.core.vector import Vector
from lightning_compress.core.workspace import chunk_size, pieces
from lightning_compress.corrections.correction import (
    Corrected,
    Correction,
    CorrectionPlan,
    dense_segments,
    zero_where_zero,
)

WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004, 0.001)
"""The paper's densities, one for each of the first epochs: 75, 93.75, 98.4375, 99.6 and 99.9 % are not sent."""


@dataclass(frozen=True)
class MomentumCorrection(Correction):
    """Momentum on each rank, before the residual is added; see ``DGC``, which checks the settings."""

    momentum: float
    nesterov: bool
    masking: bool

    def state(self, layout: Layout, compressed: Sequence[slice]) -> Mapping[str, StateSpec]:
        """Declare ``velocity``, one per rank, and ``momentum`` of the dense parameters, the same on all ranks."""
        dense = Layout.of((each.name, each.shape) for each in dense_segments(layout, compressed))
        return {"velocity": StateSpec(layout), "momentum": StateSpec(dense, "shared")}

    def plan(
        self, layout: Layout, compressed: Sequence[slice], world: World, states: States, residual: State | None
    ) -> CorrectionPlan:
        """See ``Correction.plan``."""
        return _Plan(self, layout, compressed, world, states, residual)

    @property
    def masks(self) -> bool:
        """See ``Correction.masks``."""
        return self.masking

    def restore_optimizer(self, state: dict[str, Any]) -> None:
        """See ``Correction.restore_optimizer``."""
        for group in state["param_groups"]:
            group.update(momentum=self.momentum, nesterov=self.nesterov)

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """Set SGD's momentum to 0, because the correction applies it.

        Raises:
            ValueError: the optimizer is not SGD, or its momentum settings differ from the correction's.
        """
        kind = type(optimizer).__name__
        if not isinstance(optimizer, SGD):
            raise ValueError(
                f"dgc cannot be combined with {kind} (of {', '.join(names[:3])}): it averages SGD's velocities, not "
                f"gradients; use torch.optim.SGD(lr=..., momentum={self.momentum}), or another compressor, such as "
                "'rotated'"
            )
        for group in optimizer.param_groups:
            if group["dampening"]:
                raise ValueError(f"{kind}(dampening={group['dampening']}): dgc has no dampening; set dampening=0")
            if group["momentum"] not in (0, self.momentum):
                raise ValueError(
                    f"{kind}(momentum={group['momentum']}): dgc applies momentum itself, with {self.momentum}; set "
                    f"both to the same value, as in compressor={{'name': 'dgc', 'momentum': {group['momentum']}}}, and "
                    "cycle_momentum=False for a scheduler that changes it"
                )
            if group["momentum"] and group["nesterov"] is not self.nesterov:
                raise ValueError(
                    f"{kind}(nesterov={group['nesterov']}): dgc applies momentum itself, with "
                    f"nesterov={self.nesterov}; set both to the same value"
                )
        changed = [group for group in optimizer.param_groups if group["momentum"]]
        for group in changed:
            group.update(momentum=0, nesterov=False)
        message = f"{kind}'s momentum was set to 0, because dgc applies it before it compresses"
        if any(group["weight_decay"] for group in changed):
            factor = 1 / (1 - self.momentum)
            message += f"; multiply weight_decay by {factor:g} to keep its strength, which momentum no longer amplifies"
        return message if changed else None


@dataclass(frozen=True)
class DGC(Corrected):
    """Accumulate velocities instead of gradients, send the largest elements, and reset the velocity of these.

    On every rank, with the gradient g, the velocity u and the residual v of a compressed parameter::

        u <- momentum u + g                        Nesterov: u <- momentum (u + g)
        v <- v + u                                 Nesterov: v <- v + u + g
        send the k = max(1, ceil(density * numel)) largest elements of each parameter's v;  v and u <- 0 there

    SGD without momentum gets the mean of the sent elements over the ranks. Its own momentum is set to 0 when training
    starts. Other optimizers are refused, and so is ``gradient_clip_val``, which would clip velocities; clip g with
    ``local_clip_norm``, as the paper does. The other parameters (small, 1-D) are averaged dense and get the same
    momentum afterwards.

    In dense steps (warm-up, one rank, or where ``auto`` finds dense cheaper) all of v is sent and u is not reset: that
    is exactly SGD with momentum. The same holds at density 1. Near 0, one element of each parameter is sent. Bits per
    element: ``64 * density``, so 0.064 at the default, a five-hundredth of float32. The default density comes after a
    warm-up with the paper's larger densities, one epoch each (``schedule="dgc"``, which works for any density;
    ``schedule="none"`` disables it). With ``attach``, your training loop sets the handle's ``epoch``.

    State: ``velocity`` (float32, per rank) and ``momentum`` (float32, of dense parameters, the same on all ranks).
    Together with the residual and all second buffers, 16 bytes per compressed parameter. A parameter that has no
    gradient on any rank keeps its velocity and residual.

    Weight decay stays with the optimizer: SGD adds ``weight_decay * w`` to the mean, without momentum. In plain SGD
    with momentum, and in the authors' code, momentum also acts on the decay and makes it ``1 / (1 - momentum)`` times
    as strong in the long run. Multiply weight_decay by this factor (10 for momentum 0.9) to get the same strength.

    Args:
        density: share of the elements that is sent, in (0, 1].
        momentum: momentum of SGD, in [0, 1).
        nesterov: use Nesterov's momentum.
        masking: reset u where v was sent ("momentum factor masking"), so that stale momentum is not sent again.
            Refused with exchanges that drop elements of sums (``two_shot``, ``binomial``), because what left v is not
            always applied there.
        selection: how the k largest are found; see ``TopK``. "sampled", as in the paper, takes a threshold from a
            sample and then selects among the elements that reach it. "exact" selects among all elements.
        sparsifier: another codec that sends few elements, exactly, instead of top-k: a name, a mapping or an object.

    Raises:
        ValueError: a setting is out of range, or the sparsifier does not fit.

    Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
    Training", ICLR 2018, arXiv 1712.01887.
    """

    density: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    selection: Literal["exact", "sampled"] = "sampled"
    sparsifier: Codec | Mapping[str, object] | str | None = None

    gone: ClassVar[Mapping[str, str]] = {
        "warmup": "give schedule='dgc' beside the compressor, or schedule='none' for none",
        "clip": "give local_clip_norm=1.0 beside the compressor",
        "clip_by": "give local_clip_norm={'norm': 1.0, 'by': 'bucket'} beside the compressor",
    }

    def __post_init__(self) -> None:
        TopK(self.density, selection=self.selection)
        for name, value in (("nesterov", self.nesterov), ("masking", self.masking)):
            if not isinstance(value, bool):
                raise ValueError(f"DGC({name}={value!r}): {name} must be true or false")
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, (int, float)) or not 0 <= self.momentum < 1:
            raise ValueError(f"DGC(momentum={self.momentum!r}): momentum must be in [0, 1), as SGD's; 0.9 is usual")
        if self.sparsifier is None:
            return
        codec = build("sparsifier", self.sparsifier, CODECS, (Codec,))
        if not isinstance(codec, Codec) or not (codec.sparse and codec.contractive):
            fit = [name for name, each in CODECS.complete().items() if each.sparse and each.contractive]
            raise ValueError(
                f"DGC(sparsifier={self.sparsifier!r}): a sparsifier must send few elements and leave the others in the "
                f"vector; use one of {', '.join(fit)}"
            )
        if self.masking and codec.rounds:
            raise ValueError(
                f"DGC(masking=True, sparsifier={self.sparsifier!r}): masking needs a sparsifier that sends elements "
                "exactly, and this one rounds them; set masking=False, or use 'topk' with values='fp32'"
            )
        if (self.density, self.selection) != (DGC.density, DGC.selection):
            raise ValueError(
                f"DGC(density={self.density}, selection={self.selection!r}, sparsifier={self.sparsifier!r}): density "
                "and selection are ignored with a sparsifier; give them to the sparsifier"
            )
        object.__setattr__(self, "sparsifier", codec)  # frozen; equal settings are equal, however they were given

    @property
    def codec(self) -> Codec:
        """The codec that selects what is sent."""
        return cast(Codec | None, self.sparsifier) or TopK(self.density, selection=self.selection)

    @property
    def schedule(self) -> str | None:
        """The paper's warm-up, if the density is the paper's."""
        return "dgc" if self.density == WARMUP_DENSITIES[-1] and self.sparsifier is None else None

    @property
    def correction(self) -> MomentumCorrection:
        """The momentum around the codec."""
        everything = getattr(self.codec, "density", None) == 1  # nothing is sent late, so nothing is stale
        return MomentumCorrection(self.momentum, self.nesterov, self.masking and not everything)


class _Plan(CorrectionPlan):
    def __init__(
        self,
        settings: MomentumCorrection,
        layout: Layout,
        compressed: Sequence[slice],
        world: World,
        states: States,
        residual: State | None,
    ) -> None:
        self._settings, self._residual = settings, residual
        self.idle = not settings.momentum
        self._velocity, self._momentum = states["velocity"], states["momentum"]
        self._chunk = min(chunk_size(world.device), layout.numel)
        self._compressed, self._pieces = compressed, [_cut(part, self._chunk) for part in compressed]
        dense = zip(dense_segments(layout, compressed), self._momentum.layout.segments, strict=True)
        self._dense = {segment.offset: target.span for segment, target in dense if target.numel}
        self._places = [segment.span for segment in layout.segments if segment.numel]
        self._fast = kernels.backend(__name__, world.device, "numba")

    def phase(self, step: int) -> tuple[()]:
        return ()

    def before(self, vector: Vector) -> None:
        if vector.gradient is None and self._accumulate_in_one_pass(vector):
            return
        gradient, old, new = vector.whole(), self._velocity.base(), self._velocity.pending
        for part in self._pieces:
            for piece in part:
                self._accumulate(gradient[piece], old[piece], new[piece])

    def _accumulate_in_one_pass(self, vector: Vector) -> bool:
        """Update velocity and residual in one pass; return False if that is not possible for these gradients."""
        rest, pieces = self._residual, vector.pieces
        if not self._fast or rest is None or rest.touched or pieces[0].dtype != torch.float32:
            return False
        factors = vector.factors(pieces).tolist() if vector.factors else [1.0] * len(pieces)
        rule = np.float32(self._settings.momentum), self._settings.nesterov
        buffers = [b.numpy() for state in (rest, self._velocity) for b in (state.committed, state.pending)]
        for place, piece, factor in zip(self._places, pieces, factors, strict=True):
            before, after, *velocity = (buffer[place] for buffer in buffers)
            gradient = piece.numpy(), piece.numpy().view(np.int32), np.float32(factor)
            if place.start in self._dense:
                largest = self._fast.add(*gradient, before, after)
            else:
                largest = self._fast.accumulate(*gradient, *rule, tuple(velocity), (before, after))
            if not vector.allows(largest):
                return False
        vector.source, vector.rest = Source(rest.pending), rest.pending
        return True

    def after(self, vector: Vector) -> None:
        sent = vector.rest
        for part, cut in zip(self._compressed, self._pieces, strict=True):
            for piece in cut if self._settings.masking and not vector.sends_all(part) else ():
                zero_where_zero(self._velocity.pending[piece], sent[piece])
        old, new = self._momentum.base(), self._momentum.pending
        for place, mean in zip(self._places, vector.means, strict=True):
            if place.start in self._dense:
                target = self._dense[place.start]
                self._accumulate(mean, old[target], new[target])

    def _accumulate(self, gradient: Tensor, old: Tensor, new: Tensor) -> None:
        """Write the next velocity to ``new`` and SGD's step to ``gradient``, rounded as ``torch.optim.SGD`` does."""
        momentum, fused = self._settings.momentum, kernels.backend(__name__, gradient.device, "triton")
        if fused:
            fused.accumulate(gradient, old, new, momentum, self._settings.nesterov)
        elif self._settings.nesterov:
            torch.add(old, gradient, out=new).mul_(momentum)
            gradient.add_(new)
        else:
            torch.mul(old, momentum, out=new).add_(gradient)
            gradient.copy_(new)


def _cut(part: slice, size: int) -> list[slice]:
    return [slice(part.start + p.start, part.start + p.stop) for p in pieces(part.stop - part.start, size)]
