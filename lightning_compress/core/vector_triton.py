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


def gather(
    first: Tensor, segments: Segments, codes: Tensor, out: Tensor, limit: float, flag: Tensor,
    opening: Opening | None = None, marks: tuple[int, ...] = (), scale: Tensor | None = None,
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
        marks: of each segment, the row of the mask that becomes 1 if an element is not zero; -1 for none.
    """
    rows, coded = table(segments, _TILE, out.device), AVERAGE in segments.treated
    if len(rows):
        heads: tuple[object, ...] = (rows, out, 0, out, -1, rows, 0, out, 0, rows, 0, 0, 0, 0)
        if opening:
            to, own, rank, told, bits, mask, arrived = opening
            numbers = _per_tile(marks, segments.sizes, out.device)
            sizes = len(to), triton.cdiv(told.shape[1] - 1, 8), bits, triton.cdiv(len(mask), _HEADS)
            heads = numbers, to, to.stride(0), own, rank, told, told.stride(0), mask, len(mask), arrived, *sizes
        constants = scale is not None, coded, _aligned(segments.sources, segments.sizes), _TILE, _HEADS
        inputs = first, rows, codes, out, limit, flag, flag if scale is None else scale
        _gather[(len(rows),)](*inputs, *heads, *constants, **OPTIONS)


@lru_cache(maxsize=4096)
def _per_tile(marks: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the mark of each tile of the segments, int32 ``[tiles]``."""
    of = zip(marks, sizes, strict=True)
    return torch.tensor([mark for mark, size in of for _ in range(0, size, _TILE)], dtype=torch.int32).to(device)


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
        rows: some of the gradients' rows are zeroed; or None.
        told: messages that say which, each a whole gradient; or None.
        scale: float32 scalar, by which the vector is multiplied; or None.
    """
    cut = (0,) * len(sizes), (0,) * len(sizes)
    if rows:
        cut = Bits.of(rows, told).places if told else rows.firsts, rows.counts
    tiles = _tiles(tuple(places), tuple(sizes), *cut, mean.device)
    if len(tiles):
        used = told.messages if told else rows.used if rows else mean
        step, count, several = (told.messages.stride(0), len(told.messages), told.several) if told else (0, 0, 0)
        constants = rows is not None, scale is not None, _aligned(tuple(places), tuple(sizes)), _TILE
        inputs = mean, tiles, flag, used, step, first, flag if scale is None else scale
        _scatter[(len(tiles),)](*inputs, count, width_of(count), several, *constants, **OPTIONS)


@lru_cache(maxsize=4096)
def _tiles(
    places: tuple[int, ...],
    sizes: tuple[int, ...],
    first: tuple[int, ...],
    count: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Return int64 ``[tiles, 6]``: place, start in the vector, elements, those before it, first row, width of a row."""
    found, start = [], 0
    for place, size, row, rows in zip(places, sizes, first, count, strict=True):
        for at in range(0, size, _TILE):
            found.append((place + at, start + at, min(size - at, _TILE), at, row, size // max(1, rows) if rows else 0))
        start += size
    return torch.tensor(found, dtype=torch.int64).view(-1, 6).to(device)


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
    first, rows, codes, out, limit, flag, scale,
    marks, messages, stride: tl.int64, own, rank, heads, step: tl.int64, mask, numel, arrived,
    COUNT: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr, CLEARS: tl.constexpr,
    SCALED: tl.constexpr, CODED: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0).to(tl.int64) * 6
    if tl.load(row + 2) == TILE:
        found = _gather_tile(first, row, codes, out, limit, flag, scale, SCALED, CODED, ALIGNED, TILE, True)
    else:
        found = _gather_tile(first, row, codes, out, limit, flag, scale, SCALED, CODED, ALIGNED, TILE, False)
    if COUNT:
        if BYTES:
            mark = tl.load(marks + tl.program_id(0))
            if (mark >= 0) & (found != 0):  # every program writes the same
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
    """Gather a tile, and return 1 if an element is not zero, else 0."""
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
    if CODED:  # noqa: SIM102  # known when the kernel is compiled
        if tl.load(row + 5) == _AVERAGE:
            values += decoded(codes, tl.load(row + 3), tl.load(row + 4), at, inside)
    write(out + start, at, values, inside, WHOLE)
    return tl.max((values != 0).to(tl.int32), axis=0)


@kernel
def _scatter(
    mean, tiles, flag, used, step: tl.int64, first, scale,
    TOLD: tl.constexpr, WIDTH: tl.constexpr, SEVERAL: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    value = tl.load(flag)
    if TOLD:
        told = flag_of(used, step, TOLD, WIDTH)
        if told != 0.0:  # True for NaN
            value = told
            if tl.program_id(0) == 0:
                tl.store(flag, told)
    tile = tiles + tl.program_id(0).to(tl.int64) * 6
    if tl.load(tile + 2) == TILE:
        _scatter_tile(mean, tile, value, used, step, first, scale, SEVERAL, WIDTH, ROWS, SCALED, ALIGNED, TILE, True)
    else:
        _scatter_tile(mean, tile, value, used, step, first, scale, SEVERAL, WIDTH, ROWS, SCALED, ALIGNED, TILE, False)


@triton.jit
def _scatter_tile(
    mean, tile, flag, used, step, first, scale,
    SEVERAL: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    place, start = _place(tile, ALIGNED)
    at = tl.arange(0, TILE)
    inside = at < tl.load(tile + 2)
    values = read(mean + start, at, inside, WHOLE)
    if SCALED:
        values *= tl.load(scale)
    if SEVERAL and ROWS:  # each row is a whole gradient
        if (tl.load(tile + 5) > 0) and not is_used(used, step, tl.load(tile + 4), SEVERAL, WIDTH):
            values = tl.zeros([TILE], tl.float32)
    elif ROWS:
        width = tl.load(tile + 5)
        row = tl.load(tile + 4) + (tl.load(tile + 3) + at) // tl.maximum(width, 1)
        values = tl.where(tl.load(used + row, mask=inside & (width > 0), other=1) != 0, values, 0.0)
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
