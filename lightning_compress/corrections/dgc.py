"""Deep Gradient Compression: the velocity is what is sparsified, not the gradient."""

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
"""The paper's densities of the first epochs, one for each: 75, 93.75, 98.4375, 99.6 and 99.9 % stay behind."""


@dataclass(frozen=True)
class MomentumCorrection(Correction):
    """``u = momentum u + g`` on every rank, before the residual is added; see ``DGC``, which checks the settings."""

    momentum: float
    nesterov: bool
    masking: bool

    def state(self, layout: Layout, compressed: Sequence[slice]) -> Mapping[str, StateSpec]:
        """``velocity`` of each rank, and the one ``momentum`` of what stays dense."""
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

    def give_back(self, state: dict[str, Any]) -> None:
        """See ``Correction.give_back``."""
        for group in state["param_groups"]:
            group.update(momentum=self.momentum, nesterov=self.nesterov)

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """Take SGD's momentum away from it.

        Raises:
            ValueError: it is not SGD, or its momentum is another one.
        """
        kind = type(optimizer).__name__
        if not isinstance(optimizer, SGD):
            raise ValueError(
                f"dgc cannot be combined with {kind} (which has {', '.join(names[:3])}): it is SGD with momentum, "
                f"and averages velocities, not gradients; use torch.optim.SGD(lr=..., momentum={self.momentum}), or "
                "another compressor, such as 'rotated'"
            )
        for group in optimizer.param_groups:
            if group["dampening"]:
                raise ValueError(
                    f"{kind}(dampening={group['dampening']}): dgc's momentum has no dampening; set dampening=0"
                )
            if group["momentum"] not in (0, self.momentum):
                raise ValueError(
                    f"{kind}(momentum={group['momentum']}): dgc does the momentum itself, with {self.momentum}; set "
                    f"both to the same value, as in compressor={{'name': 'dgc', 'momentum': {group['momentum']}}}, and "
                    "cycle_momentum=False for a scheduler that changes it"
                )
            if group["momentum"] and group["nesterov"] is not self.nesterov:
                raise ValueError(
                    f"{kind}(nesterov={group['nesterov']}), but dgc, which does the momentum, has "
                    f"nesterov={self.nesterov}; set both to the same value"
                )
        changed = [group for group in optimizer.param_groups if group["momentum"]]
        for group in changed:
            group.update(momentum=0, nesterov=False)
        said = f"{kind}'s momentum was set to 0: dgc does it, before it compresses"
        if any(group["weight_decay"] for group in changed):
            said += (
                f"; its weight_decay has none now, and is as strong as before if it is {1 / (1 - self.momentum):g} x"
            )
        return said if changed else None


@dataclass(frozen=True)
class DGC(Corrected):
    """Accumulate the velocity ``u`` instead of the gradient, send its largest elements, and zero ``u`` of these.

    On every rank, for the parameters that are compressed::

        u <- momentum u + g                        Nesterov: u <- momentum (u + g)
        v <- v + u                                 Nesterov: v <- v + u + g;  v is the residual
        send the k = max(1, ceil(density * numel)) largest elements of each parameter's v;  v and u <- 0 there

    and the mean over the ranks of what was sent is what SGD without momentum is given: its own momentum is set to 0
    when training begins, and any optimizer but SGD is refused, as is ``gradient_clip_val``, which would clip
    velocities; ``local_clip_norm`` clips g, as the paper does. The other parameters (small, 1-D) are averaged as they
    are and then get the same momentum. In dense steps (warm-up, one rank, where ``auto`` finds dense cheaper)
    all of v is sent and no u is forgotten: that is SGD with momentum, exactly. ``64 * density`` bits per element:
    0.064, a five-hundredth, at the default. At a density of 1 all is sent and nothing forgotten either; near 0 one
    element of each parameter is sent. At the default density it begins with the paper's others, an epoch each
    (``schedule="dgc"``, as for any density; ``schedule="none"`` does without); with ``attach``, who trains sets the
    handle's ``epoch``.

    State: ``velocity`` (float32, per rank) and ``momentum`` (float32, of what stays dense, the same on all ranks),
    beside the residual: with their second buffers 16 bytes per compressed parameter. A parameter without a gradient on
    any rank keeps velocity and residual.

    Weight decay stays with the optimizer: SGD adds ``weight_decay * w`` to what it is given, outside of the momentum.
    The authors' code gives the decay a momentum of its own, and in SGD with momentum it goes through the same one; in
    the long run that makes it ``1 / (1 - momentum)`` times as strong: multiply weight_decay by that (10 for 0.9).

    Args:
        density: share that is sent, in (0, 1].
        momentum: of SGD, in [0, 1).
        nesterov: Nesterov's momentum.
        masking: forget u where v was sent ("momentum factor masking"), so that stale momentum is not sent again. It
            is refused with exchanges that drop elements of sums (``two_shot``, ``binomial``), by which what
            left v is not always applied.
        selection: how the k largest are found, see ``TopK``: "sampled" takes a threshold from a sample and selects
            again among what passed, as the paper does; "exact" selects among all.
        sparsifier: another codec that sends few elements, exactly, in place of top-k, by name, mapping or object.

    Raises:
        ValueError: a setting is out of range, or the sparsifier is none.

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
                f"DGC(sparsifier={self.sparsifier!r}): what is sent has to be 0 in the vector and the rest has to "
                f"stay there, as for {', '.join(fit)}; use one of these"
            )
        if self.masking and codec.rounds:
            raise ValueError(
                f"DGC(masking=True, sparsifier={codec}): it sends elements rounded, so that something of them stays, "
                "but masking takes for sent what is 0 then; set masking=False, or take a sparsifier that sends them as "
                "they are, such as 'topk' with values='fp32'"
            )
        if (self.density, self.selection) != (DGC.density, DGC.selection):
            raise ValueError(
                f"DGC(density={self.density}, selection={self.selection!r}, sparsifier={self.sparsifier!r}): density "
                "and selection are those of the top-k that a sparsifier stands in for; give them to the sparsifier"
            )
        object.__setattr__(self, "sparsifier", codec)  # frozen; equal settings are equal, however they were given

    @property
    def codec(self) -> Codec:
        """What selects."""
        return cast(Codec | None, self.sparsifier) or TopK(self.density, selection=self.selection)

    @property
    def schedule(self) -> str | None:
        """The paper's warm-up, at the paper's density."""
        return "dgc" if self.density == WARMUP_DENSITIES[-1] and self.sparsifier is None else None

    @property
    def correction(self) -> MomentumCorrection:
        """The momentum."""
        everything = getattr(self.codec, "density", None) == 1  # nothing is late then, so nothing is stale
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
        self._dense = {segment.offset: own.span for segment, own in dense if own.numel}
        self._places = [segment.span for segment in layout.segments if segment.numel]
        self._fast = kernels.backend(__name__, world.device, "numba")

    def before(self, vector: Vector) -> None:
        if vector.gradient is None and self._fed(vector):
            return
        gradient, old, new = vector.whole(), self._velocity.base(), self._velocity.pending
        for part in self._pieces:
            for piece in part:
                self._accumulate(gradient[piece], old[piece], new[piece])

    def _fed(self, vector: Vector) -> bool:
        """Do all of it, and add the residual, in one pass; not of gradients that are all zeros, nor in a second one."""
        rest, pieces = self._residual, vector.pieces
        if not self._fast or rest is None or rest.touched or pieces[0].dtype != torch.float32:
            return False
        factors = vector.factors(pieces).tolist() if vector.factors else [1.0] * len(pieces)
        rule = np.float32(self._settings.momentum), self._settings.nesterov
        buffers = [each.numpy() for state in (rest, self._velocity) for each in (state.committed, state.pending)]
        for place, each, factor in zip(self._places, pieces, factors, strict=True):
            before, after, *velocity = (numbers[place] for numbers in buffers)
            given = each.numpy(), each.numpy().view(np.int32), np.float32(factor)
            if place.start in self._dense:
                largest = self._fast.add(*given, before, after)
            else:
                largest = self._fast.accumulate(*given, *rule, tuple(velocity), (before, after))
            if not kernels.sound(largest):
                return False
        vector.sent, vector.sound = rest.pending, True
        return True

    def after(self, vector: Vector) -> None:
        sent = vector.made()
        for part, cut in zip(self._compressed, self._pieces, strict=True):
            for piece in cut if self._settings.masking and not vector.sends_all(part) else ():
                zero_where_zero(self._velocity.pending[piece], sent[piece])
        old, new = self._momentum.base(), self._momentum.pending
        for place, mean in zip(self._places, vector.means, strict=True):
            if place.start in self._dense:
                own = self._dense[place.start]
                self._accumulate(mean, old[own], new[own])

    def _accumulate(self, gradient: Tensor, old: Tensor, new: Tensor) -> None:
        """Write the next velocity, and over the gradient what a step along it adds; in SGD's order of rounding."""
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
    return [slice(part.start + each.start, part.start + each.stop) for each in pieces(part.stop - part.start, size)]
