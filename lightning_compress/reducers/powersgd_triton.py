"""GPU kernels of ``powersgd.py``: what is done to rows of factors. Bit-identical to its tensor operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import OPTIONS, kernel

_TILE = 2048
"""Elements that a program handles at a time."""


def table(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Return the rows of batches that lie side by side: int64 ``[rows, 2]``, first element and length."""
    rows, start = [], 0
    for count, ranks, length in shapes:
        for _ in range(count * ranks):
            rows.append((start, length))
            start += length
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(device)


def about_one(rows: Tensor, numbers: Tensor, out: Tensor, source: Tensor, target: Tensor) -> None:
    """Write each row times a power of two, such that its largest magnitude is about 1; and copy other numbers.

    Args:
        rows: see ``table``.
        numbers: float32, the rows.
        out: float32, overwritten; may be ``numbers``.
        source: float32 ``[n]``.
        target: float32 ``[n]``, becomes ``source``.
    """
    grid = (len(rows) + triton.cdiv(len(source), _TILE),)
    if grid[0]:
        _about_one[grid](numbers, out, rows, source, target, len(rows), len(source), _TILE, **OPTIONS)


def average(rows: Tensor, sums: Tensor, weight: float, before: Tensor, means: Tensor) -> None:
    """Multiply sums by ``weight``, and keep what a row was before if it became zeros.

    Args:
        rows: see ``table``.
        sums: float32, the rows; become what is kept.
        weight: is rounded to float32.
        before: float32, the rows that were kept before.
        means: float32, overwritten by the products.
    """
    if len(rows):
        _average[(len(rows),)](sums, before, means, rows, weight, _TILE, **OPTIONS)


@kernel
def _about_one(numbers, out, rows, source, target, count, copied, TILE: tl.constexpr):
    program = tl.program_id(0)
    if program < count:
        start, length = tl.load(rows + 2 * program), tl.load(rows + 2 * program + 1)
        largest = _largest(numbers + start, length, 1.0, TILE)
        exponent = tl.where(largest > 0, (largest >> 23) - 126, 0)
        power = tl.minimum(tl.maximum(-exponent, -126), 126)
        factor = ((power + 127) << 23).to(tl.float32, bitcast=True)
        position = length * 0
        while position < length:
            index = position + tl.arange(0, TILE)
            values = tl.load(numbers + start + index, mask=index < length, other=0.0)
            tl.store(out + start + index, values * factor, mask=index < length)
            position += TILE
    else:
        index = (program - count).to(tl.int64) * TILE + tl.arange(0, TILE)
        tl.store(target + index, tl.load(source + index, mask=index < copied, other=0.0), mask=index < copied)


@kernel
def _average(sums, before, means, rows, weight, TILE: tl.constexpr):
    row = rows + 2 * tl.program_id(0)
    start, length = tl.load(row), tl.load(row + 1)
    empty = (_largest(sums + start, length, weight, TILE) == 0).to(tl.float32)
    position = length * 0
    while position < length:
        index = position + tl.arange(0, TILE)
        inside = index < length
        values = tl.load(sums + start + index, mask=inside, other=0.0) * weight
        kept = values + tl.load(before + start + index, mask=inside, other=0.0) * empty
        tl.store(means + start + index, values, mask=inside)
        tl.store(sums + start + index, kept, mask=inside)
        position += TILE


@triton.jit
def _largest(numbers, length, weight, TILE: tl.constexpr):
    """Return the largest magnitude of numbers times ``weight``, as the bits of a float32; those of NaN are larger."""
    largest = tl.zeros([TILE], tl.int32)
    position = length * 0
    while position < length:
        index = position + tl.arange(0, TILE)
        values = tl.load(numbers + index, mask=index < length, other=0.0) * weight
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        position += TILE
    return tl.max(largest, axis=0)
