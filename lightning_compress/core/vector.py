"""What a group averages in a backward pass: gradients, and what becomes of them before they are encoded and after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core.workspace import pieces

_LARGEST_HALF = torch.finfo(torch.float16).max


@dataclass
class Vector:
    """The gradients of a group's parameters in one backward pass on this rank.

    They stay in pieces, where DistributedDataParallel has them, as long as every stage does its work in one pass over
    them. ``whole`` copies them side by side, where something has to be done to the gradients themselves.

    Args:
        pieces: the gradients, one-dimensional, contiguous, of one dtype, of the parameters that are not empty. Each
            becomes its mean over the ranks, or what else the optimizer is given.
        take: returns float32 ``[numel]`` of undefined content by a name, which vectors that come later share.
        step: how many steps were committed.
        scale: what the loss was multiplied by, or None.
        draws: what random numbers are drawn from, equal on all ranks.
        left_out: names of parameters whose gradients on this rank are the means of the pass before.
        limit: a larger magnitude counts as not finite.
        dense: the stretches that are sent as they are.
        in_place: some ranks may average in this pass where gradients are, with none of the stages.
        fast: ``kernel_of`` the device.

    Attributes:
        flag: float32 scalar, 0.0, or NaN if a gradient is not finite; in the end of any rank.
        gradient: float32 ``[numel]``, the gradients that stages change, once they were copied; zeros where they were
            not finite.
        factors: of gradients in pieces, what each is to be multiplied by, if that was not done; or None.
        sent: float32 ``[numel]``, what is averaged, once it was made; afterwards what this rank did not send.
        summands: two vectors whose sum ``sent`` is to be, if the exchange is to add them up as it encodes.
        sound: every parameter has a gradient that is finite and not 0 everywhere; else nothing is known.
        means: float32, the means, in pieces.
        mean: float32 ``[numel]``, the same, where they stand side by side; or None.
    """

    pieces: list[Tensor]
    take: Callable[[str], Tensor]
    step: int = 0
    scale: Tensor | None = None
    draws: tuple[int, ...] = (0,)
    left_out: Collection[str] = frozenset()
    limit: float = torch.inf
    dense: Sequence[slice] = ()
    in_place: bool = False
    fast: ModuleType | None = None
    gradient: Tensor | None = None
    factors: Callable[[list[Tensor]], Tensor] | None = None
    sent: Tensor | None = None
    summands: kernels.Summands = None
    sound: bool = False
    means: list[Tensor] = field(default_factory=list)
    mean: Tensor | None = None

    def __post_init__(self) -> None:
        self.device = self.pieces[0].device
        self.flag = torch.zeros((), device=self.device)
        self.sizes = [each.numel() for each in self.pieces]

    def whole(self) -> Tensor:
        """The gradients side by side, as ``gradient``; copied when it is called first."""
        if self.gradient is None:
            self.gradient = self.take("gradient")
            if self.limit < kernels.LARGEST or not self._copy(self.gradient):
                self.flag = clean(torch.cat(self.pieces, out=self.gradient), self.limit)
            if self.factors:
                self.rescale(self.factors)
        return self.gradient

    @property
    def raw(self) -> bool:
        """Whether the gradients are in pieces alone, and as they are to be."""
        return self.gradient is None and self.factors is None

    def rescale(self, factors: Callable[[list[Tensor]], Tensor]) -> None:
        """Multiply the gradients by ``factors(pieces)``, float32 ``[pieces]``; once they are copied, if they are not.

        A stage that reads the pieces in one pass may do it there instead.
        """
        self.factors = factors
        if self.gradient is not None:
            gradients, self.factors = self.split(self.gradient), None
            torch._foreach_mul_(gradients, list(factors(gradients).unbind()))

    def _copy(self, out: Tensor) -> bool:
        """Copy the gradients in one pass; returns whether there is one, and no number is above ``kernels.LARGEST``."""
        if not self.fast or self.pieces[0].dtype != torch.float32:
            return False
        parts = zip(self.pieces, self.split(out), strict=True)
        return all(self.fast.copy(*_read(piece), part.numpy()) <= kernels.LARGEST_BITS for piece, part in parts)

    def add(self, addend: Tensor, out: Tensor, factor: float = 1.0) -> bool:
        """Send gradients and something else, added up in one pass on a CPU.

        Args:
            addend: float32 ``[numel]``.
            out: float32 ``[numel]``, written; becomes what is sent.
            factor: of the addend.

        Returns:
            whether that was done: every gradient is float32, no number is above ``kernels.LARGEST`` and none is all
            zeros; if not, ``out`` has no meaning.
        """
        if self.pieces[0].dtype != torch.float32:
            return False
        for piece, before, after in zip(self.pieces, self.split(addend), self.split(out), strict=True):
            if self.fast and factor == 1:
                sound = 0 < self.fast.add(*_read(piece), before.numpy(), after.numpy()) <= kernels.LARGEST_BITS
            else:
                lowest, highest = torch.aminmax(piece)
                sound = 0.0 < float(torch.maximum(-lowest, highest)) <= kernels.LARGEST
                torch.add(piece, before, alpha=factor, out=after)
            if not sound:
                return False
        self.sent, self.sound = out, True
        return True

    def made(self) -> Tensor:
        """What is sent: the gradients, if no stage made anything else of them."""
        if self.sent is None:
            self.sent = self.whole()
        return self.sent

    def split(self, vector: Tensor) -> list[Tensor]:
        """Its parts, as long as the pieces."""
        return list(vector.split(self.sizes))

    def sends_all(self, span: slice) -> bool:
        """Whether this stretch is sent as it is, with no error."""
        return any(each.start <= span.start and span.stop <= each.stop for each in self.dense)

    def stretches(self, most: int) -> Iterator[tuple[slice, Tensor]]:
        """The means, at most so many elements at a time, and where they stand in the vector."""
        start = 0
        for mean in self.means if self.mean is None else [self.mean]:
            for piece in pieces(len(mean), most):
                yield slice(start + piece.start, start + piece.stop), mean[piece]
            start += len(mean)

    def out(self, in_pieces: bool) -> Tensor | list[Tensor]:
        """Where the means are written: over the gradients, if ``in_pieces`` and these are float32, or to one vector."""
        if in_pieces and self.pieces[0].dtype == torch.float32:
            self.means = self.pieces
            return self.pieces
        self.mean = self.take("mean" if self.sent is self.gradient else "gradient")
        self.means = self.split(self.mean)
        return self.mean

    def give(self) -> None:
        """Replace the gradients by the means, which saturate in float16, and are NaN where the flag is."""
        if self.scale is None and self.pieces[0].dtype == torch.float16:  # a residual can bring it above what it holds
            torch._foreach_clamp_min_(self.means, -_LARGEST_HALF)
            torch._foreach_clamp_max_(self.means, _LARGEST_HALF)
        spoil(self.means if self.mean is None else [self.mean], self.flag)
        if self.means is not self.pieces:
            torch._foreach_copy_(self.pieces, self.means)


def kernel_of(device: torch.device) -> ModuleType | None:
    """The kernels by which a CPU adds up gradients and something else, or None."""
    return kernels.backend(__name__, device, "numba")


class Stage:
    """Something that is done to gradients before they are averaged, and to their means after."""

    def before(self, vector: Vector) -> None:
        """Change what will be sent; stages are called in order."""

    def after(self, vector: Vector) -> None:
        """Change the means, or what was not sent; stages are called from the last one to the first."""


def _read(piece: Tensor) -> tuple[Any, Any]:
    """A float32 tensor of a CPU as an array, and its bits as integers."""
    array = piece.numpy()
    return array, array.view(np.int32)


def clean(gradient: Tensor, limit: float) -> Tensor:
    """Write zeros where a gradient is not finite; on an accelerator without waiting for the result.

    Args:
        gradient: float32 ``[n]``; becomes 0 at least where it is not finite.
        limit: a larger magnitude counts as not finite, and stays.

    Returns:
        float32 scalar: 0.0, or NaN where anything was not finite.
    """
    if fused := kernels.backend(__name__, gradient.device, "triton"):
        flag = torch.zeros((), device=gradient.device)
        fused.clean(gradient, limit, flag)
        return flag
    lowest, highest = torch.aminmax(gradient)
    flag = (lowest + highest) * 0.0
    if limit < torch.inf:
        flag.masked_fill_(torch.maximum(-lowest, highest) > limit, torch.nan)
    if gradient.device.type != "cpu" or flag.isnan():
        gradient.masked_fill_(flag.isnan(), 0.0)
    return flag


def spoil(means: Sequence[Tensor], flag: Tensor) -> None:
    """Make means, float32, what their flag says: themselves at 0.0, and NaN everywhere at NaN."""
    if flag.device.type == "cpu" and float(flag) == 0.0:
        return
    fused = kernels.backend(__name__, flag.device, "triton")
    for mean in means:
        if fused:
            fused.add_flag(flag, mean)
        else:
            mean.add_(flag)


_BLOCK = 1 << 20
"""Elements that are squared at once."""


def squares(tensor: Tensor, other: Tensor | None = None) -> Tensor:
    """The sum of squares of a tensor, or of what it differs by from another one, in float64, block by block."""
    parts = tensor.reshape(-1).split(_BLOCK)
    others = [0.0] * len(parts) if other is None else other.reshape(-1).split(_BLOCK)
    return torch.stack([(each - less).double().square().sum() for each, less in zip(parts, others, strict=True)]).sum()
