"""What a group averages in a backward pass: its gradients, before they are encoded and after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat
from types import ModuleType
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core import blocks, source
from lightning_compress.core.blocks import Segments, table
from lightning_compress.core.source import NO_CODES, NOTHING, Gradients, Memory, Pieces, Source
from lightning_compress.core.told import Opening, Rows, Told
from lightning_compress.core.workspace import pieces, scratch
from lightning_compress.kernels import program

_LARGEST_HALF = torch.finfo(torch.float16).max
_LARGEST, _INFINITE = torch.finfo(torch.float32).max, 0x7F800000
"""The largest finite float32, and the bits of an infinite one."""


@dataclass
class Vector:
    """The gradients of a group's parameters in one backward pass on this rank.

    They stay in pieces, in DistributedDataParallel's memory, until they are encoded. A stage that has to change the
    gradients themselves calls ``whole``, which copies them into one vector.

    Args:
        memory: where the gradients are. Each becomes its mean over the ranks, or another input of the optimizer.
        step: number of committed steps.
        scale: the factor of the loss, float32 scalar, or None.
        left_out: names of parameters whose gradients on this rank are still the means of the pass before.
        limit: a larger magnitude counts as not finite.
        dense: slices that are sent uncompressed.
        in_place: some ranks may average in place in this pass, without any stage.
        marked: the exchange tells other ranks what is unused on this one.
        fused: kernels of ``kernel_of``, on an accelerator.
        draws: key parts for random numbers, equal on all ranks.

    Attributes:
        pieces: the gradients of parameters that are not empty: one-dimensional, contiguous, of one dtype.
        flag: float32 scalar, 0.0, or NaN if a gradient is not finite; after the exchange, of any rank.
        nonfinite: indices of the pieces that were not finite; always empty on an accelerator, because reading them
            would wait for the device.
        gradient: float32 ``[numel]``, the copied gradients that stages change; zeros if any was not finite. None before
            the copy.
        factors: function of the pieces that returns the factor of each, if they were not multiplied yet; or None.
        errors: the arguments of ``add_errors``, if what reads the gradients adds them.
        source: what is averaged; None before ``send``.
        rest: float32 ``[numel]``, memory for what this rank does not send, which it holds after the exchange.
        means: float32, the means, in pieces.
        mean: float32 ``[numel]``, the means as one vector; None if they are not contiguous.
        rows: rows of the means that are zeroed while they are written to the gradients, or None.
        opening: heads that are written while the gradients are copied, because they stay as they are; or None.
        factor: ``scale``, if no stage divides by it and multiplies the means, but those who copy them; or None.
        marks: of each piece, its rows of the mask of ``opening``, or -1: of the gradient, and of what is sent.
        looked: what is added to the gradients and decides with them what is used, or None.
        told: messages whose heads are read then, too, for the flag and in place of ``rows.used``; or None.
    """

    memory: Memory
    step: int = 0
    scale: Tensor | None = None
    left_out: Collection[str] = frozenset()
    limit: float = torch.inf
    dense: Sequence[slice] = ()
    in_place: bool = False
    marked: bool = False
    fused: ModuleType | None = None
    draws: tuple[int, ...] = (0,)
    nonfinite: list[int] = field(default_factory=list)
    gradient: Tensor | None = None
    factors: Callable[[list[Tensor]], Tensor] | None = None
    errors: tuple[tuple[int, ...], tuple[int, ...], Tensor] | None = None
    source: Source | None = None
    means: list[Tensor] = field(default_factory=list)
    mean: Tensor | None = None
    rows: Rows | None = None
    told: Told | None = None
    opening: Opening | None = None
    marks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    looked: Tensor | None = None
    factor: Tensor | None = None
    rest: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = self.memory.pieces
        self.device = self.pieces[0].device
        self.flag = new_flag(self.device)

    def take(self, name: str) -> Tensor:
        """Return float32 ``[numel]`` of undefined content, shared by all vectors under this name; see ``scratch``."""
        return scratch(name, self.memory.numel, torch.float32, self.device)

    def whole(self) -> Tensor:
        """Return ``gradient``, the gradients as one vector; the first call copies them."""
        if self.gradient is None:
            if self._lies:
                self.gradient = self._where_it_lies(self.take("gradient")).into(None)
            else:
                nothing = (-1,) * len(self.pieces)
                self._gather(nothing, nothing, self.pieces[0].new_empty(0, dtype=torch.uint8))
            if self.factors:
                self.rescale(self.factors)
        return cast(Tensor, self.gradient)

    def send(self, rest: Tensor | None = None, addend: Tensor | None = None) -> None:
        """Let the exchange average the gradients, or their sum with an addend.

        Args:
            rest: see the class; None: scratch memory, or that of ``gradient``.
            addend: float32 ``[numel]``, or None.
        """
        if self._lies:
            self.rest = self.take("gradient") if rest is None else rest
            self.source = self._where_it_lies(self.rest, addend)
        else:
            self.rest = self.whole() if rest is None else rest
            self.source = Source(self.whole(), addend, self.rest)

    @property
    def _lies(self) -> bool:
        """Whether kernels for a CPU read the gradients where they lie."""
        return self.memory.place is not None and self.gradient is None and self.factors is None

    def _where_it_lies(self, rest: Tensor, addend: Tensor | None = None) -> Gradients:
        place, codes = self.memory.place, NO_CODES
        if self.errors:
            *treated, coded = self.errors
            place, codes = self.memory.placed(*treated), coded.numpy()
        assert place is not None
        return Gradients(place, rest, addend, codes, _most(self.limit), self.spoil)

    def terms(self, number: int, span: slice) -> list[Tensor]:
        """Return tensors that are zero if what is sent of a piece is, by its number and its slice of the vector."""
        assert self.source
        if not isinstance(self.source, Gradients):
            return self.source.terms(span)
        terms = [self.pieces[number], *([] if self.source.addend is None else [self.source.addend[span]])]
        if self.errors and (code := self.errors[0][number]) >= 0:
            terms.append(self.errors[2][code : code + self.memory.sizes[number]])
        return terms

    def add_errors(self, coded: tuple[int, ...], treated: tuple[int, ...], codes: Tensor) -> None:
        """Add errors that are kept in 8 bits to the gradients, in the pass that reads them if nothing did yet.

        Args:
            coded: see ``blocks.Segments``.
            treated: see ``blocks.Segments``.
            codes: uint8, of all errors.
        """
        if self._lies:
            self.errors = coded, treated, codes
        elif self.gradient is None and self.factors is None:
            self._gather(coded, treated, codes)
        else:
            add_errors(Segments(self.memory.starts, self.memory.sizes, coded, treated), codes, self.whole(), self.flag)

    def rescale(self, factors: Callable[[list[Tensor]], Tensor]) -> None:
        """Multiply the gradients by ``factors(pieces)``, float32 ``[pieces]``: now, or when ``whole`` copies them.

        A stage that reads the pieces in one pass may multiply there instead.
        """
        self.factors = factors
        if self.gradient is not None:
            gradients, self.factors = self.split(self.gradient), None
            torch._foreach_mul_(gradients, list(factors(gradients).unbind()))

    def _gather(self, coded: tuple[int, ...], treated: tuple[int, ...], codes: Tensor) -> None:
        """Copy the gradients to ``gradient``, zeros if one is not finite, and add the errors."""
        self.gradient = out = self.take("gradient")
        together, segments = self.memory.bucket, Segments(self.memory.starts, self.memory.sizes, coded, treated)
        if self.fused and together:
            segments = segments._replace(sources=together.places)
            heads = self.opening, self.marks, self.factor, self.looked
            self.fused.gather(together.first, segments, codes, out, self.limit, self.flag, *heads)
            return
        self.flag = clean(torch.cat(self.pieces, out=out), self.limit, self.flag)
        if self.device.type == "cpu" and self.flag.isnan():
            self.spoil()
        add_errors(segments, codes, out, self.flag)

    def allows(self, largest: int) -> bool:
        """Return whether gradients with this largest magnitude, given as the bits of a float32, may be averaged."""
        return largest <= _most(self.limit)

    def spoil(self) -> None:
        """Note on a CPU that a gradient is not finite, before anything is written to the gradients."""
        self.flag.fill_(torch.nan)
        limit = min(self.limit, _LARGEST)
        self.nonfinite = self.nonfinite or [
            number for number, piece in enumerate(self.pieces) if not piece.abs().max() <= limit
        ]

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split a vector into parts as long as the pieces."""
        return list(vector.split(self.memory.sizes))

    def sends_all(self, span: slice) -> bool:
        """Whether this slice is sent uncompressed, without error."""
        return any(each.start <= span.start and span.stop <= each.stop for each in self.dense)

    def stretches(self, most: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of at most ``most`` elements of the vector, each with the means there."""
        start = 0
        for mean in self.means if self.mean is None else [self.mean]:
            for piece in pieces(len(mean), most):
                yield slice(start + piece.start, start + piece.stop), mean[piece]
            start += len(mean)

    def out(self) -> Tensor | Pieces:
        """Return where to write the means: over the gradients if that is possible, else to one vector."""
        if self.memory.place is not None:
            self.means = self.pieces
            return self.memory.place
        self.mean = self.take("mean" if self.rest.data_ptr() == self.take("gradient").data_ptr() else "gradient")
        self.means = self.split(self.mean)
        return self.mean

    def give(self) -> None:
        """Write the means to the gradients: clamped to the range of float16, and NaN if the flag is."""
        if self.scale is None and self.pieces[0].dtype == torch.float16:  # a residual can exceed its range
            torch._foreach_clamp_min_(self.means, -_LARGEST_HALF)
            torch._foreach_clamp_max_(self.means, _LARGEST_HALF)
        if self.fused and self.mean is not None and (together := self.memory.bucket):
            places = together.places, self.memory.sizes
            first = together.first
            self.fused.scatter(self.mean, *places, self.flag, first, self.rows, self.told, self.factor)
            return
        assert self.rows is None
        assert self.told is None
        poison(self.means if self.mean is None else [self.mean], self.flag)
        if self.means is not self.pieces:
            torch._foreach_copy_(self.pieces, self.means)


@cache
def _most(limit: float) -> int:
    """Return the bits of the largest float32 that is finite and not above a limit."""
    return min(int(np.float32(limit).view(np.int32)), _INFINITE - 1)


_FLAGS = 256
"""Flags that are allocated at a time on an accelerator, where each allocation would have to start a kernel."""


def new_flag(device: torch.device) -> Tensor:
    """Return a new float32 scalar of 0.0; while a step is recorded, the flag that each of its repetitions has anew."""
    if tape := program.here.tape:
        with tape.apart():
            flag = new_flag(device)
        tape.give(flag)
        return flag
    return torch.zeros((), dtype=torch.float32) if device.type == "cpu" else next(_zeros(device))


@cache
def _zeros(device: torch.device) -> Iterator[Tensor]:
    # at multiples of 16 bytes, for which kernels are compiled that are given other flags later
    flags = (torch.zeros(_FLAGS, 4, dtype=torch.float32, device=device)[:, 0] for _ in repeat(None))
    return (flag for some in flags for flag in some)


def add_errors(segments: Segments, codes: Tensor, vector: Tensor, flag: Tensor) -> None:
    """Add errors that are kept in 8 bits to a finite vector; see ``blocks.add``. ``flag`` is a float32 scalar."""
    if blocks.AVERAGE not in segments.treated:
        return
    segments = segments._replace(sources=tuple(start for _, start, *_ in segments.rows))
    if fast := kernel_of(vector.device):
        place = vector.numpy(), table(segments, None, vector.device).numpy(), 0, len(vector)
        fast.load((place, NOTHING, codes.numpy()), 0, len(vector), vector.numpy())
    elif fused := kernel_of(vector.device, "triton"):
        fused.gather(vector, segments, codes, vector, torch.inf, flag)
    else:
        blocks.add(segments, codes, vector)


def kernel_of(device: torch.device, by: str = "numba") -> ModuleType | None:
    """Return the kernels of a compiler that copy gradients, and add to them, or None."""
    return kernels.backend(source.__name__ if by == "numba" else __name__, device, by)


class Stage:
    """A transformation of gradients before they are averaged, and of their means after."""

    def phase(self, step: int) -> Hashable | None:
        """Return what of the step's number decides the calls that it makes; None if they must not be recorded.

        Equal phases mean equal calls if the states' memory and touched parameters are the same, too; see
        ``engine/programs.py``.
        """
        return None

    def before(self, vector: Vector) -> None:
        """Change what will be sent; stages are called in order."""

    def after(self, vector: Vector) -> None:
        """Change the means, or what was not sent; stages are called in reverse order."""


def clean(gradient: Tensor, limit: float, zero: Tensor) -> Tensor:
    """Zero a gradient where it is not finite; on an accelerator without waiting for the result.

    Args:
        gradient: float32 ``[n]``; becomes 0 at least where it is not finite.
        limit: a larger magnitude counts as not finite, but may stay.
        zero: float32 scalar, 0.0, which may become the result.

    Returns:
        float32 scalar: 0.0, or NaN if a value was not finite.
    """
    if fused := kernels.backend(__name__, gradient.device, "triton"):
        fused.clean(gradient, limit, zero)
        return zero
    lowest, highest = torch.aminmax(gradient)
    flag = (lowest + highest) * 0.0
    if limit < torch.inf:
        flag.masked_fill_(torch.maximum(-lowest, highest) > limit, torch.nan)
    if gradient.device.type != "cpu" or flag.isnan():
        gradient.masked_fill_(flag.isnan(), 0.0)
    return flag


def poison(means: Sequence[Tensor], flag: Tensor) -> None:
    """Add the flag to float32 means: they stay as they are at 0.0, and become NaN at NaN."""
    if flag.device.type == "cpu" and not program.here.tape and float(flag) == 0.0:
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
    """Return the sum of squares of a tensor, or of its difference from another, in float64, block by block."""
    parts = tensor.reshape(-1).split(_BLOCK)
    others = [0.0] * len(parts) if other is None else other.reshape(-1).split(_BLOCK)
    return torch.stack([(each - less).double().square().sum() for each, less in zip(parts, others, strict=True)]).sum()
