"""Cast a bucket into a message, and a sum of messages back into the bucket; see ``all_reduce.py``.

Both are one launch, which also finds numbers that are not finite. Bit-identical to tensor operations.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.cast_triton import floats, halved
from lightning_compress.core.told_triton import arrive
from lightning_compress.kernels.triton.launch import OPTIONS, kernel, read, write

_TILE = 2048
"""Elements per program."""


def table(rows: Iterable[tuple[int, int, int]], device: torch.device) -> tuple[Tensor, bool]:
    """Cut stretches of a bucket, each given as (place in the bucket, place in the message, elements), into tiles.

    Returns:
        int64 ``[tiles, 3]``, such stretches of at most 2048 elements; and whether all begin at multiples of 8.
    """
    tiles = [
        (place + at, start + at, min(numel - at, _TILE))
        for place, start, numel in rows
        for at in range(0, numel, _TILE)
    ]
    aligned = not any(place % 8 or start % 8 for place, start, _ in tiles)
    return torch.tensor(tiles, dtype=torch.int64).view(-1, 3).to(device), aligned


def encode(
    first: Tensor, tiles: tuple[Tensor, bool], message: Tensor, limit: float, flag: Tensor, arrived: Tensor
) -> None:
    """Cast gradients into a message, whose first number becomes the flag.

    Args:
        first: the float32 gradient at the lowest address.
        tiles: see ``table``.
        message: float16, bfloat16 or float32.
        limit: larger magnitudes saturate.
        flag: float32 scalar, 0.0 or NaN; becomes NaN if an element is not finite.
        arrived: int32 ``[1]``, 0 before and after.
    """
    inputs = first, tiles[0], _words(message), limit, flag, arrived
    _encode[(len(tiles[0]),)](*inputs, tiles[1], _TILE, **OPTIONS)


def decode(message: Tensor, tiles: tuple[Tensor, bool], first: Tensor, weight: float, flag: Tensor) -> None:
    """Write a message times ``weight`` over the gradients, or NaN if its first number is not finite; see ``encode``.

    Args:
        message: a sum of messages.
        tiles: see ``table``.
        first: the float32 gradient at the lowest address.
        weight: is rounded to float32.
        flag: float32 scalar, overwritten with 0.0 or NaN.
    """
    _decode[(len(tiles[0]),)](_words(message), tiles[0], first, weight, flag, tiles[1], _TILE, **OPTIONS)


def _words(message: Tensor) -> Tensor:
    """Return numbers as kernels take them: bfloat16 as int16; see ``cast_triton.py``."""
    return message.view(torch.int16) if message.dtype == torch.bfloat16 else message


@triton.jit
def _place(tiles, ALIGNED: tl.constexpr):
    """Return a program's place in the bucket and in the message; if multiples of 8, so that the compiler knows."""
    row = tiles + tl.program_id(0).to(tl.int64) * 3
    place, start = tl.load(row), tl.load(row + 1)
    if ALIGNED:
        place, start = place // 8 * 8, start // 8 * 8
    return place, start, tl.load(row + 2)


@kernel
def _encode(first, tiles, message, limit, flag, arrived, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    place, start, numel = _place(tiles, ALIGNED)
    if numel == TILE:
        _encode_tile(first + place, message + start, limit, flag, numel, TILE, True)
    else:
        _encode_tile(first + place, message + start, limit, flag, numel, TILE, False)
    if arrive(arrived):  # what others stored is not looked up in the cache of this one's processor
        value = tl.where(tl.load(flag, cache_modifier=".cg") == 0.0, 0.0, float("nan"))
        tl.store(message, halved(value, message.dtype.element_ty))
        tl.store(arrived, 0)


@triton.jit
def _encode_tile(numbers, message, limit, flag, numel, TILE: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.arange(0, TILE)
    values = read(numbers, at, at < numel, WHOLE)
    small = tl.maximum(tl.minimum(values, limit), -limit)
    write(message, at, halved(small, message.dtype.element_ty), at < numel, WHOLE)
    if tl.min((tl.abs(values) < float("inf")).to(tl.int32), axis=0) == 0:  # every program writes the same
        tl.store(flag, float("nan"))


@kernel
def _decode(message, tiles, first, weight, flag, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    place, start, numel = _place(tiles, ALIGNED)
    total = floats(tl.load(message)) * 0.0  # 0.0 or NaN
    if numel == TILE:
        _decode_tile(message + start, first + place, weight, total, numel, TILE, True)
    else:
        _decode_tile(message + start, first + place, weight, total, numel, TILE, False)
    if tl.program_id(0) == 0:
        tl.store(flag, total)


@triton.jit
def _decode_tile(message, out, weight, total, numel, TILE: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.arange(0, TILE)
    values = floats(read(message, at, at < numel, WHOLE)) * weight
    write(out, at, tl.where(total == 0.0, values, total), at < numel, WHOLE)
