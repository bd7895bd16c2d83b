"""Elements as floats of a few bits made for their range; see ``range_float.py``, whose bits these are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.packing.planes_triton import later_planes, read_codes, write_codes
from lightning_compress.codecs.quantize import minifloat_triton
from lightning_compress.kernels.triton.launch import (
    OPTIONS,
    Summands,
    float_view,
    indices,
    kernel,
    read,
    read_sum,
    sources,
    width_of,
    write,
)

LONGEST = 8192
"""Elements of a block, at most: one program holds it in registers."""
_TILE = 4096
"""Elements that a program handles; several blocks where they are shorter."""


@dataclass(frozen=True)
class Shape:
    """What the message looks like.

    Args:
        block: elements that share a range, at most ``LONGEST``; a multiple of 8.
        bits: of a code.
        nearest: round to nearest instead of cutting off.
        mantissa: bits of mantissa, or -1: those with the least of the errors that ``measure`` finds.
        body: where the codes begin in the message.
        used: where they end; zeros follow.
    """

    block: int
    bits: int
    nearest: bool
    mantissa: int
    body: int
    used: int

    @property
    def tile(self) -> tuple[int, int]:
        """The width of a tile, and how many blocks it has."""
        width = width_of(self.block)
        return width, max(1, _TILE // width)

    @property
    def options(self) -> dict[str, Any]:
        """What kernels are launched with: a thread has 16 elements, as more would take too many registers."""
        return {**OPTIONS, "num_warps": max(width_of(self.block), _TILE) // 512}


def measure(vector: Tensor, summands: Summands, errors: Tensor, sample: tuple[int, int, int], shape: Shape) -> None:
    """Find how much each number of bits of mantissa would lose.

    Args:
        vector: float32 ``[n]``; what is meant is in it, or in the summands, see ``Summands``.
        summands: see there.
        errors: float64 ``[rows, candidates]``, gets the sums of squared errors on every row of a sample.
        sample: elements of a row, from one row to the next, and from one element that counts to the next.
        shape: of the message.
    """
    length, distance, skip = sample
    first, second, both = sources(vector, summands)
    settings = {**OPTIONS, "num_warps": 8}
    _measure[tuple(errors.shape)](
        first, second, errors, distance, length, skip, width_of(length), shape.bits, shape.nearest, both, **settings
    )


def encode(vector: Tensor, summands: Summands, message: Tensor, errors: Tensor, shape: Shape) -> None:
    """Move every element, as a float of a few bits, into the message.

    Args:
        vector: float32 ``[n]``, not empty; gets what stays, of itself or of the summands' sum.
        summands: see ``Summands``.
        message: uint8, wholly overwritten.
        errors: from ``measure``, if the mantissa is not given.
        shape: of the message.
    """
    count, (width, rows) = triton.cdiv(len(vector), shape.block), shape.tile
    first, second, both = sources(vector, summands)
    parts = message, message[shape.body :], shape.body - 16 - 8 * count, shape.used - shape.body
    numbers = len(message) - shape.body, errors, len(vector), count, *later_planes(len(vector), shape.bits)
    _encode[(triton.cdiv(count, rows),)](
        first, second, vector, float_view(message, 16, 2 * count), *parts, *numbers,
        shape.block, width, rows, shape.bits, shape.nearest, shape.mantissa, *errors.shape, both, **shape.options,
    )  # fmt: skip


def decode(messages: Tensor, out: Tensor, weight: float, accumulate: bool, shape: Shape) -> None:
    """Write, or add, ``weight`` times the sum of messages ``[M, size]``, whose rows may be strided; see ``encode``."""
    count, (width, rows) = triton.cdiv(len(out), shape.block), shape.tile
    header, body = float_view(messages, 0, 4 + 2 * count), messages[:, shape.body :]
    numbers = len(out), count, *later_planes(len(out), shape.bits)
    _decode[(triton.cdiv(count, rows),)](
        header, header.stride(0), body, body.stride(0), out, weight, *numbers,
        shape.block, width, rows, shape.bits, shape.nearest, accumulate, len(messages), **shape.options,
    )  # fmt: skip


@kernel
def _measure(
    first, second, errors, distance: tl.int64, length, skip,
    WIDTH: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    row, mantissa, column = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    inside = column < length
    numbers = read_sum(first + row * distance, second + row * distance, column, inside, SUM, False)[None, :]
    low, high = tl.min(numbers, axis=1), tl.max(numbers, axis=1)
    error = minifloat_triton.error(numbers, *minifloat_triton.build(low, high, mantissa, BITS, NEAREST)).to(tl.float64)
    counts = (inside & (column % skip == 0))[None, :]
    squares = tl.sum(tl.where(counts, error * error, 0.0), axis=1)
    index = row * tl.num_programs(1) + mantissa
    tl.store(errors + index + tl.arange(0, 1), squares)


@kernel(do_not_specialize=["gap", "used", "size", "count"])
def _encode(
    first, second, vector, ranges, message, body, gap: tl.int64, used: tl.int64, size: tl.int64, errors,
    numel: tl.int64, count: tl.int64, middle, last,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr,
    MANTISSA: tl.constexpr, SAMPLE: tl.constexpr, TRIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    if MANTISSA < 0:
        mantissa = minifloat_triton.best(errors, SAMPLE, TRIED)
    else:
        mantissa = tl.full([], MANTISSA, tl.int32)
    number = tl.program_id(0)
    codes = ranges, body, middle, last, numel, count, mantissa
    if BLOCK == WIDTH and (number + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _encode_tile(first, second, vector, *codes, BLOCK, WIDTH, ROWS, BITS, NEAREST, SUM, True)
    else:
        _encode_tile(first, second, vector, *codes, BLOCK, WIDTH, ROWS, BITS, NEAREST, SUM, False)
    if number == 0:
        some, zeros = tl.arange(0, 16), tl.zeros([16], tl.uint8)
        minifloat_triton.write_mantissa(message, mantissa)
        tl.store(body - gap + some, zeros, mask=some < gap)
        tl.store(body + used + some, zeros, mask=some < size - used)


@triton.jit
def _encode_tile(
    first, second, vector, ranges, body, middle, last, numel, count, mantissa,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr,
    SUM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index, inside = indices(number, numel, BLOCK, WIDTH)
    numbers = read_sum(first, second, index, inside, SUM, WHOLE)
    low, high = tl.min(numbers, axis=1), tl.max(numbers, axis=1)
    low, high = tl.where(low < 0, low, 0.0), tl.where(high > 0, high, 0.0)  # neither is -0.0
    tl.store(ranges + number, low, mask=number < count)
    tl.store(ranges + count + number, high, mask=number < count)
    codes, sent = minifloat_triton.encode(numbers, *minifloat_triton.build(low, high, mantissa, BITS, NEAREST))
    write(vector, index, numbers - sent, inside, WHOLE)
    write_codes(codes, body, middle, last, number * BLOCK, numel, BLOCK, BITS, WHOLE)


@kernel(do_not_specialize=["count"])
def _decode(
    header, step: tl.int64, body, stride: tl.int64, out, weight, numel: tl.int64,
    count: tl.int64, middle, last,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr,
    ADD: tl.constexpr, MESSAGES: tl.constexpr,
):  # fmt: skip
    rows = header, step, body, stride, out, weight, numel, count, middle, last
    if BLOCK == WIDTH and (tl.program_id(0) + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _decode_tile(*rows, BLOCK, WIDTH, ROWS, BITS, NEAREST, ADD, MESSAGES, True)
    else:
        _decode_tile(*rows, BLOCK, WIDTH, ROWS, BITS, NEAREST, ADD, MESSAGES, False)


@triton.jit
def _decode_tile(
    header, step: tl.int64, body, stride: tl.int64, out, weight, numel, count, middle, last,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr,
    ADD: tl.constexpr, MESSAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index, inside = indices(number, numel, BLOCK, WIDTH)
    total = read(out, index, inside, WHOLE) if ADD else tl.zeros([ROWS, WIDTH], tl.float32)
    for message in range(MESSAGES):
        row = header + message * step
        mantissa = tl.load(row).to(tl.int32, bitcast=True)
        low = tl.load(row + 4 + number, mask=number < count, other=0.0)
        high = tl.load(row + 4 + count + number, mask=number < count, other=0.0)
        shift, _, below, positive, negative = minifloat_triton.build(low, high, mantissa, BITS, NEAREST)
        first = number * BLOCK
        codes = read_codes(body + message * stride, middle, last, first, numel, BLOCK, WIDTH, BITS, WHOLE)
        magnitudes, minus = minifloat_triton.decode(codes, shift, below, positive, negative, BITS)
        magnitudes *= weight
        total += tl.where(minus, -magnitudes, magnitudes)
    write(out, index, total, inside, WHOLE)
