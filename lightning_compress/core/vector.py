"""What a group averages in a backward pass: its gradients, before they are encoded and after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, repeat
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core import blocks
from lightning_compress.core.blocks import Segments, table
from lightning_compress.core.workspace import pieces, scratch
from lightning_compress.kernels import program

_LARGEST_HALF = torch.finfo(torch.float16).max


class Rows(NamedTuple):
    """Rows of gradients, of which some are unused.

    Attributes:
        firsts: of each gradient, the index of its first row in ``used``.
        counts: of each gradient, how many rows of one length it has; 0 if it is used.
        used: uint8, 0 for unused rows.
    """

    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    used: Tensor


@dataclass
class Vector:
    """The gradients of a group's parameters in one backward pass on this rank.

    They stay in pieces, in DistributedDataParallel's memory, as long as every stage does its work in one pass over
    them. A stage that has to change the gradients themselves calls ``whole``, which copies them into one vector.

    Args:
        pieces: the gradients of parameters that are not empty: one-dimensional, contiguous, of one dtype. Each becomes
            its mean over the ranks, or another input of the optimizer.
        step: number of committed steps.
        scale: the factor of the loss, float32 scalar, or None.
        draws: key parts for random numbers, equal on all ranks.
        left_out: names of parameters whose gradients on this rank are still the means of the pass before.
        limit: a larger magnitude counts as not finite.
        dense: slices that are sent uncompressed.
        in_place: some ranks may average in place in this pass, without any stage.
        marked: the exchange tells other ranks what is unused on this one.
        fast: kernels of ``kernel_of``, on a CPU.
        fused: kernels of ``kernel_of``, on an accelerator.

    Attributes:
        flag: float32 scalar, 0.0, or NaN if a gradient is not finite; after the exchange, of any rank.
        gradient: float32 ``[numel]``, the copied gradients that stages change; zeros if any was not finite. None before
            the copy.
        factors: function of the pieces that returns the factor of each, if they were not multiplied yet; or None.
        sent: float32 ``[numel]``, what is averaged; after the exchange, what this rank did not send. None before a
            stage sets it.
        summands: two vectors whose sum is ``sent``, if the exchange is to add them while it encodes.
        sound: True if every gradient is finite and not all zeros; False means unknown.
        means: float32, the means, in pieces.
        mean: float32 ``[numel]``, the means as one vector; None if they are not contiguous.
        rows: rows of the means that are zeroed while they are written to the gradients, or None.
    """

    pieces: list[Tensor]
    step: int = 0
    scale: Tensor | None = None
    draws: tuple[int, ...] = (0,)
    left_out: Collection[str] = frozenset()
    limit: float = torch.inf
    dense: Sequence[slice] = ()
    in_place: bool = False
    marked: bool = False
    fast: ModuleType | None = None
    fused: ModuleType | None = None
    gradient: Tensor | None = None
    factors: Callable[[list[Tensor]], Tensor] | None = None
    sent: Tensor | None = None
    summands: kernels.Summands = None
    sound: bool = False
    means: list[Tensor] = field(default_factory=list)
    mean: Tensor | None = None
    rows: Rows | None = None

    def __post_init__(self) -> None:
        self.device = self.pieces[0].device
        self.flag = new_flag(self.device)
        self.sizes = tuple(each.numel() for each in self.pieces)

    def take(self, name: str) -> Tensor:
        """Return float32 ``[numel]`` of undefined content, shared by all vectors under this name; see ``scratch``."""
        return scratch(name, sum(self.sizes), torch.float32, self.device)

    def whole(self) -> Tensor:
        """Return ``gradient``, the gradients as one vector; the first call copies them."""
        if self.gradient is None:
            nothing = (-1,) * len(self.sizes)
            self._gather(nothing, nothing, self.pieces[0].new_empty(0, dtype=torch.uint8))
            if self.factors:
                self.rescale(self.factors)
        return cast(Tensor, self.gradient)

    def add_errors(self, coded: tuple[int, ...], treated: tuple[int, ...], codes: Tensor) -> None:
        """Add errors that are kept in 8 bits to the gradients, in the pass that copies them if nothing did yet.

        Args:
            coded: see ``blocks.Segments``.
            treated: see ``blocks.Segments``.
            codes: uint8, of all errors.
        """
        if self.raw:
            self._gather(coded, treated, codes)
        else:
            add_errors(Segments(self.starts, self.sizes, coded, treated), codes, self.whole(), self.flag)

    @property
    def raw(self) -> bool:
        """Whether the gradients are in pieces only, and unchanged."""
        return self.gradient is None and self.factors is None

    def rescale(self, factors: Callable[[list[Tensor]], Tensor]) -> None:
        """Multiply the gradients by ``factors(pieces)``, float32 ``[pieces]``: now, or when ``whole`` copies them.

        A stage that reads the pieces in one pass may multiply there instead.
        """
        self.factors = factors
        if self.gradient is not None:
            gradients, self.factors = self.split(self.gradient), None
            torch._foreach_mul_(gradients, list(factors(gradients).unbind()))

    @cached_property
    def bucket(self) -> Adjacent | None:
        """Where the pieces lie if they fill one piece of memory."""
        return adjacent(self.pieces)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first element of each piece in a vector."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    def _gather(self, coded: tuple[int, ...], treated: tuple[int, ...], codes: Tensor) -> None:
        """Copy the gradients to ``gradient``, zeros if one is not finite, and add the errors."""
        self.gradient = out = self.take("gradient")
        together, segments = self.bucket, Segments(self.starts, self.sizes, coded, treated)
        if self.fused and together:
            self.fused.gather(
                together.first, segments._replace(sources=together.places), codes, out, self.limit, self.flag
            )
            return
        if self.fast and self.pieces[0].dtype == torch.float32 and self.limit >= kernels.LARGEST:
            bounds = self._gather_on_cpu(together, segments, codes, out)
            if bounds[1] <= kernels.LARGEST_BITS:
                self.sound = bounds[0] > 0
                return
        self.flag = clean(torch.cat(self.pieces, out=out), self.limit, self.flag)
        add_errors(segments, codes, out, self.flag)

    def _gather_on_cpu(
        self, together: Adjacent | None, segments: Segments, codes: Tensor, out: Tensor
    ) -> tuple[int, int]:
        """Return the least and the largest of the pieces' largest magnitudes, as the bits of float32."""
        assert self.fast
        if together:
            rows = table(segments._replace(sources=together.places), None, self.device)
            return tuple(self.fast.gather(*_read(together.whole()), rows.numpy(), codes.numpy(), out.numpy()))
        rows, bounds = table(segments._replace(sources=(0,) * len(self.sizes)), None, self.device), []
        for piece, row in zip(self.pieces, rows.split(1), strict=True):
            bounds.append(self.fast.gather(*_read(piece), row.numpy(), codes.numpy(), out.numpy()))
        return min(least for least, _ in bounds), max(most for _, most in bounds)

    def add(self, addend: Tensor, out: Tensor, factor: float = 1.0) -> bool:
        """Set ``sent`` to the gradients plus an addend, in one pass on a CPU.

        Args:
            addend: float32 ``[numel]``.
            out: float32 ``[numel]``, overwritten; becomes ``sent``.
            factor: of the addend.

        Returns:
            True if the gradients are ``raw`` and float32, no value is above ``kernels.LARGEST``, and no gradient is all
            zeros. Otherwise nothing was set, and the content of ``out`` is undefined.
        """
        if not self.raw or self.pieces[0].dtype != torch.float32:
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
        """Return ``sent``, which is the gradients if no stage set it."""
        if self.sent is None:
            self.sent = self.whole()
        return self.sent

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split a vector into parts as long as the pieces."""
        return list(vector.split(self.sizes))

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

    def out(self, in_pieces: bool) -> Tensor | list[Tensor]:
        """Return where to write the means: over the float32 gradients if ``in_pieces``, else one vector."""
        if in_pieces and self.pieces[0].dtype == torch.float32:
            self.means = self.pieces
            return self.pieces
        self.mean = self.take("mean" if self.sent is self.gradient else "gradient")
        self.means = self.split(self.mean)
        return self.mean

    def give(self) -> None:
        """Write the means to the gradients: clamped to the range of float16, and NaN if the flag is."""
        if self.scale is None and self.pieces[0].dtype == torch.float16:  # a residual can exceed its range
            torch._foreach_clamp_min_(self.means, -_LARGEST_HALF)
            torch._foreach_clamp_max_(self.means, _LARGEST_HALF)
        if self.fused and self.mean is not None and (together := self.bucket):
            self.fused.scatter(self.mean, together.places, self.sizes, self.flag, together.first, self.rows)
            return
        assert self.rows is None
        poison(self.means if self.mean is None else [self.mean], self.flag)
        if self.means is not self.pieces:
            torch._foreach_copy_(self.pieces, self.means)


@dataclass(frozen=True)
class Adjacent:
    """Tensors that together fill a piece of memory, in any order.

    Attributes:
        first: the tensor at the lowest address.
        places: of each tensor, the elements from there to its own first one.
        numel: elements of all of them.
    """

    first: Tensor
    places: tuple[int, ...]
    numel: int

    def whole(self) -> Tensor:
        """Return all of them as one tensor."""
        return self.first.as_strided((self.numel,), (1,))


def adjacent(tensors: Sequence[Tensor]) -> Adjacent | None:
    """Return where contiguous tensors of one dtype lie if they fill one piece of one storage, as in a bucket."""
    first = min(tensors, key=torch.Tensor.data_ptr)
    size, begin = first.element_size(), first.data_ptr()
    places = tuple((each.data_ptr() - begin) // size for each in tensors)
    numel, last = sum(each.numel() for each in tensors), tensors[max(range(len(places)), key=places.__getitem__)]
    if last.data_ptr() + last.nbytes - begin != numel * size:
        return None
    if last.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return None
    return Adjacent(first, places, numel)


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
        fast.gather(*_read(vector), table(segments, None, vector.device).numpy(), codes.numpy(), vector.numpy())
    elif fused := kernel_of(vector.device, "triton"):
        fused.gather(vector, segments, codes, vector, torch.inf, flag)
    else:
        blocks.add(segments, codes, vector)


def kernel_of(device: torch.device, by: str = "numba") -> ModuleType | None:
    """Return the kernels of a compiler that copy gradients, and add to them, or None."""
    return kernels.backend(__name__, device, by)


class Stage:
    """A transformation of gradients before they are averaged, and of their means after."""

    def phase(self, step: int) -> Hashable | None:
        """Return what of the step's number decides the calls that it makes; None if they must not be recorded.

        Equal phases mean equal calls if the states' memory and touched parameters are the same, too; see
        ``engine/program.py``.
        """
        return None

    def before(self, vector: Vector) -> None:
        """Change what will be sent; stages are called in order."""

    def after(self, vector: Vector) -> None:
        """Change the means, or what was not sent; stages are called in reverse order."""


def _read(piece: Tensor) -> tuple[Any, Any]:
    """Return a float32 CPU tensor as an array, and its bits as int32."""
    array = piece.numpy()
    return array, array.view(np.int32)


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
