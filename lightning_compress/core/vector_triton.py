"""Find and spread non-finite values; see ``vector.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.core.blocks import AVERAGE, Segments, table
from lightning_compress.core.blocks_triton import decoded
from lightning_compress.core.told import Bits, Opening, Rows, Told
from lightning_compress.core.told_triton import arrive, flag_of, is_used, open_messages
from lightning_compress.kernels.triton.launch import OPTIONS, kernel, read, width_of, write

_AVERAGE = tl.constexpr(AVERAGE)

_TILE = 2048
"""Elements per program."""
_HEADS = 128
"""Peers, or bytes of heads, that are written at once."""
Marks = tuple[tuple[int, ...], tuple[int, ...]]


def gather(
    first: Tensor, segments: Segments, codes: Tensor, out: Tensor, limit: float, flag: Tensor,
    opening: Opening | None = None, marks: Marks = ((), ()), scale: Tensor | None = None, addend: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy gradients into a vector, zeros where they are not finite, and add the errors that are to be averaged.

    Args:
        first: the gradient at the lowest address, of any floating-point dtype.
        segments: of the vector; ``sources`` count elements from ``first`` on.
        codes: uint8, of all errors.
        out: float32 ``[numel]``, overwritten; may be ``first``.
        limit: the largest allowed magnitude of a gradient; may be infinite.
        flag: float32 scalar, 0.0; becomes NaN if a larger value was found.
        opening: the heads of messages, which are written at the end; or None.
        scale: float32 scalar; gradients are multiplied by its reciprocal; or None.
        marks: of each segment, the rows of the mask that become 1 if an element is not zero, or -1: of the gradient,
            and of what is sent.
        addend: float32 ``[numel]``, is sent with the vector; or None.
    """
    rows, coded = table(segments, _TILE, out.device), AVERAGE in segments.treated
    if len(rows):
        heads: tuple[object, ...] = (rows, out, 0, out, -1, rows, 0, out, 0, rows, 0, 0, 0, 0)
        if opening:
            to, own, rank, told, bits, mask, arrived = opening
            numbers = _per_tile(*marks, segments.sizes, out.device)
            sizes = len(to), triton.cdiv(told.shape[1] - 1, 8), bits, triton.cdiv(len(mask), _HEADS)
            heads = numbers, to, to.stride(0), own, rank, told, told.stride(0), mask, len(mask), arrived, *sizes
        added = addend is not None, scale is not None
        constants = *added, coded, _aligned(segments.sources, segments.sizes), _TILE, _HEADS
        inputs = (
            first,
            rows,
            codes,
            out,
            limit,
            flag,
            flag if scale is None else scale,
            out if addend is None else addend,
        )
        _gather[(len(rows),)](*inputs, *heads, *constants, **OPTIONS)


@lru_cache(maxsize=4096)
def _per_tile(kept: tuple[int, ...], marks: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the marks of each tile of the segments, int32 ``[tiles, 2]``."""
    rows = [both for *both, size in zip(kept, marks, sizes, strict=True) for _ in range(0, size, _TILE)]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 2).to(device)


@lru_cache(maxsize=4096)
def _aligned(places: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether all parts begin at a multiple of 16 bytes, in memory and in the vector."""
    return not any(each % 4 for each in [*places, *accumulate(sizes[:-1])])


def scatter(
    mean: Tensor, places: Sequence[int], sizes: Sequence[int], flag: Tensor, first: Tensor, rows: Rows | None,
    told: Told | None, scale: Tensor | None,
) -> None:  # fmt: skip
    """Copy a vector's parts to where the gradients are, and add a flag.

    Args:
        mean: float32 ``[numel]``.
        places: of each gradient, its distance in elements from ``first``.
        sizes: of each gradient, its elements.
        flag: float32 scalar; becomes NaN if one of ``told`` is not finite.
        first: the gradient at the lowest address, of any floating-point dtype.
        rows: some of the gradients' rows are zeroed, and those of a state are or stay as they were; or None.
        told: messages that say which, each a whole gradient; or None.
        scale: float32 scalar, by which the vector is multiplied; or None.
    """
    nothing = (0,) * len(sizes)
    cut = nothing, nothing, nothing
    if rows:
        bits = Bits.of(rows, told)
        cut = bits.places if told else rows.firsts, rows.counts, bits.kept
    tiles = _tiles(tuple(places), tuple(sizes), *cut, mean.device)
    if len(tiles):
        used = told.messages if told else rows.used if rows else mean
        step, count, several = (told.messages.stride(0), len(told.messages), told.several) if told else (0, 0, 0)
        rest, before = (rows.rest, rows.before) if rows else (None, None)
        given = rows is not None, rest is not None, scale is not None
        constants = *given, _aligned(tuple(places), tuple(sizes)), _TILE
        inputs = mean, tiles, flag, used, step, first, flag if scale is None else scale
        inputs += mean if rest is None else rest, mean if before is None else before
        _scatter[(len(tiles),)](*inputs, count, width_of(count), several, *constants, **OPTIONS)


@lru_cache(maxsize=4096)
def _tiles(
    places: tuple[int, ...],
    sizes: tuple[int, ...],
    first: tuple[int, ...],
    count: tuple[int, ...],
    kept: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Return int64 ``[tiles, 7]``.

    They are: place, start in the vector, elements, those before it, first row, width of a row, row of ``Rows.kept``.
    """
    found, start = [], 0
    for place, size, row, rows, keeps in zip(places, sizes, first, count, kept, strict=True):
        for at in range(0, size, _TILE):
            width = size // max(1, rows) if rows else 0
            found.append((place + at, start + at, min(size - at, _TILE), at, row, width, keeps))
        start += size
    return torch.tensor(found, dtype=torch.int64).view(-1, 7).to(device)


def clean(numbers: Tensor, limit: float, flag: Tensor) -> None:
    """Find values that are not finite or above a limit, and overwrite those that are not finite with 0.0.

    Args:
        numbers: float32 ``[n]``.
        limit: the largest allowed magnitude; may be infinite.
        flag: float32 scalar, 0.0; becomes NaN if a value was found.
    """
    if len(numbers):
        _clean[(triton.cdiv(len(numbers), _TILE),)](numbers, limit, flag, len(numbers), _TILE, **OPTIONS)


def add_flag(flag: Tensor, target: Tensor) -> None:
    """Add a float32 scalar to float32 ``target [n]``; if it is 0.0, as in most steps, ``target`` is not touched."""
    if len(target):
        _add_flag[(triton.cdiv(len(target), _TILE),)](flag, target, len(target), _TILE, **OPTIONS)


@kernel(do_not_specialize=["rank", "numel"])
def _gather(
    first, rows, codes, out, limit, flag, scale, addend,
    marks, messages, stride: tl.int64, own, rank, heads, step: tl.int64, mask, numel, arrived,
    COUNT: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr, CLEARS: tl.constexpr,
    ADDED: tl.constexpr, SCALED: tl.constexpr, CODED: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0).to(tl.int64) * 6
    if tl.load(row + 2) == TILE:
        found = _gather_tile(first, row, codes, out, limit, flag, scale, SCALED, CODED, ALIGNED, TILE, True)
    else:
        found = _gather_tile(first, row, codes, out, limit, flag, scale, SCALED, CODED, ALIGNED, TILE, False)
    if COUNT:
        if BYTES:
            kept, mark = tl.load(marks + tl.program_id(0) * 2), tl.load(marks + tl.program_id(0) * 2 + 1)
            sent = found // 2
            if ADDED:  # noqa: SIM102  # known when the kernel is compiled
                if (mark >= 0) & (sent == 0):
                    at = tl.arange(0, TILE)
                    more = tl.load(addend + tl.load(row + 1) + at, mask=at < tl.load(row + 2), other=0.0)
                    sent = tl.max((more != 0).to(tl.int32), axis=0)
            if (kept >= 0) & (found % 2 != 0):  # every program writes the same
                tl.store(mask + kept, 1)
            if (mark >= 0) & (sent != 0):
                tl.store(mask + mark, 1)
        if arrive(arrived):
            open_messages(messages, stride, own, rank, heads, step, mask, numel, flag, COUNT, BYTES, BITS, CLEARS, SIZE)
            tl.store(arrived, 0)


@triton.jit
def _place(row, ALIGNED: tl.constexpr):
    """Return a row's place in memory and in the vector; if they are multiples of 4, so that the compiler knows."""
    place, start = tl.load(row), tl.load(row + 1)
    if ALIGNED:
        place, start = place // 4 * 4, start // 4 * 4
    return place, start


@triton.jit
def _gather_tile(
    first, row, codes, out, limit, flag, scale,
    SCALED: tl.constexpr, CODED: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Gather a tile, and return 1 if an element of the gradient is not zero, plus 2 if one of its sums is not."""
    place, start = _place(row, ALIGNED)
    at = tl.arange(0, TILE)
    inside = at < tl.load(row + 2)
    values = read(first + place, at, inside, WHOLE).to(tl.float32)
    finite, sound = _check(values, limit)
    if sound == 0:
        tl.store(flag, float("nan"))
        values = tl.where(finite, values, 0.0)
    if SCALED:
        values *= tl.div_rn(1.0, tl.load(scale))
        finite = tl.abs(values) < float("inf")
        if CODED and tl.min(finite.to(tl.int32), axis=0) == 0:  # the reciprocal of a small scale is large
            tl.store(flag, float("nan"))
            values = tl.where(finite, values, 0.0)
    found = tl.max((values != 0).to(tl.int32), axis=0)
    sums = found
    if CODED:  # noqa: SIM102  # known when the kernel is compiled
        if tl.load(row + 5) == _AVERAGE:
            values += decoded(codes, tl.load(row + 3), tl.load(row + 4), at, inside)
            sums = tl.max((values != 0).to(tl.int32), axis=0)
    write(out + start, at, values, inside, WHOLE)
    return found + 2 * sums


@kernel
def _scatter(
    mean, tiles, flag, used, step: tl.int64, first, scale, rest, before,
    TOLD: tl.constexpr, WIDTH: tl.constexpr, SEVERAL: tl.constexpr, ROWS: tl.constexpr, RESTS: tl.constexpr,
    SCALED: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    value = tl.load(flag)
    if TOLD:
        told = flag_of(used, step, TOLD, WIDTH)
        if told != 0.0:  # True for NaN
            value = told
            if tl.program_id(0) == 0:
                tl.store(flag, told)
    tile = tiles + tl.program_id(0).to(tl.int64) * 7
    inputs = mean, tile, value, used, step, first, scale, rest, before
    if tl.load(tile + 2) == TILE:
        _scatter_tile(*inputs, SEVERAL, WIDTH, ROWS, RESTS, SCALED, ALIGNED, TILE, True)
    else:
        _scatter_tile(*inputs, SEVERAL, WIDTH, ROWS, RESTS, SCALED, ALIGNED, TILE, False)


@triton.jit
def _scatter_tile(
    mean, tile, flag, used, step, first, scale, rest, before,
    SEVERAL: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, RESTS: tl.constexpr, SCALED: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    place, start = _place(tile, ALIGNED)
    at = tl.arange(0, TILE)
    inside = at < tl.load(tile + 2)
    values = read(mean + start, at, inside, WHOLE)
    if SCALED:
        values *= tl.load(scale)
    if SEVERAL and ROWS:  # each row is a whole gradient
        had = is_used(used, step, tl.load(tile + 6), SEVERAL, WIDTH)
        if not (had & is_used(used, step, tl.load(tile + 4), SEVERAL, WIDTH)):
            values = tl.zeros([TILE], tl.float32)
            if RESTS:  # where no rank has a gradient, ``rest`` stays as it was
                kept = tl.load(before + start + at, mask=inside & (had == 0), other=0.0)
                write(rest + start, at, kept, inside, WHOLE)
    elif ROWS:
        width = tl.load(tile + 5)
        row = tl.load(tile + 4) + (tl.load(tile + 3) + at) // tl.maximum(width, 1)
        here = tl.load(used + row, mask=inside & (width > 0), other=1) != 0
        values = tl.where(here, values, 0.0)
        if RESTS:
            tl.store(rest + start + at, tl.zeros([TILE], tl.float32), mask=inside & (here == 0))
    values += flag
    write(first + place, at, values.to(first.dtype.element_ty), inside, WHOLE)


@triton.jit
def _check(values, limit):
    """Return which values are finite, and 1 if all are and none is above the limit, else 0."""
    magnitudes = tl.abs(values)
    finite = magnitudes < float("inf")  # False for NaN
    return finite, tl.min((finite & (magnitudes <= limit)).to(tl.int32), axis=0)


@kernel
def _clean(numbers, limit, flag, numel, TILE: tl.constexpr):
    if (tl.program_id(0) + 1).to(tl.int64) * TILE <= numel:
        _clean_tile(numbers, limit, flag, numel, TILE, True)
    else:
        _clean_tile(numbers, limit, flag, numel, TILE, False)


@triton.jit
def _clean_tile(numbers, limit, flag, numel, TILE: tl.constexpr, WHOLE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = read(numbers, index, index < numel, WHOLE)
    finite, sound = _check(values, limit)
    if sound == 0:  # every program writes the same
        tl.store(flag, float("nan"))
        tl.store(numbers + index, tl.where(finite, values, 0.0), mask=index < numel)


@kernel
def _add_flag(flag, target, numel, TILE: tl.constexpr):
    value = tl.load(flag)
    if value != 0.0:  # True for NaN
        index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        tl.store(target + index, tl.load(target + index, mask=index < numel) + value, mask=index < numel)
