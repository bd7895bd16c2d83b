"""A sign for each element and one or two values for each block; see ``signs.py``, whose bits these are."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.packing.planes_triton import read_codes, write_codes
from lightning_compress.kernels.triton.launch import (
    OPTIONS,
    Summands,
    clear,
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
_TILE = 2048
"""Elements that a program handles; several blocks where they are shorter."""


def encode(vector: Tensor, summands: Summands, message: Tensor, block: int, values: int, bits: int) -> None:
    """Move the values of every block, and a bit for each element, into the message.

    Args:
        vector: float32 ``[n]``; gets what stays, of itself or of the summands' sum.
        summands: see ``Summands``.
        message: uint8, wholly overwritten.
        block: elements that share values, at most ``LONGEST``; a multiple of 8.
        values: 2 for the means of either side, 1 for the mean magnitude.
        bits: where bits begin in the message.
    """
    count = -(-len(vector) // block)
    if not count:
        return
    width, rows, options = _tile(block)
    first, second, both = sources(vector, summands)
    header = float_view(message, 0, values * count)
    parts = header, message[4 * values * count :], bits - 4 * values * count, message[bits:]
    shape = block, width, rows, values == 2
    _encode[(triton.cdiv(count, rows),)](first, second, vector, *parts, len(vector), count, *shape, both, **options)


def decode(messages: Tensor, out: Tensor, weight: float, accumulate: bool, block: int, values: int, bits: int) -> None:
    """Write, or add, ``weight`` times the sum of messages ``[M, size]``, whose rows may be strided; see ``encode``."""
    count = -(-len(out) // block)
    if not count:
        return
    width, rows, options = _tile(block)
    header, body = float_view(messages, 0, values * count), messages[:, bits:]
    parts = header, header.stride(0), body, body.stride(0)
    shape = block, width, rows, values == 2, accumulate, len(messages)
    _decode[(triton.cdiv(count, rows),)](*parts, out, weight, len(out), count, *shape, **options)


def _tile(block: int) -> tuple[int, int, dict[str, Any]]:
    """The width of a tile, how many blocks it has, and the warps that hold 32 elements a thread, at most."""
    width = width_of(block)
    return width, max(1, _TILE // width), OPTIONS | {"num_warps": max(4, width // 1024)}


@kernel
def _encode(
    first, second, vector, header, gap, padding, bits, numel: tl.int64, count,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MEANS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    if BLOCK == WIDTH and (number + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _encode_tile(first, second, vector, header, bits, numel, count, BLOCK, WIDTH, ROWS, MEANS, SUM, True)
    else:
        _encode_tile(first, second, vector, header, bits, numel, count, BLOCK, WIDTH, ROWS, MEANS, SUM, False)
    if number == 0:
        clear(gap, padding)


@triton.jit
def _encode_tile(
    first, second, vector, header, bits, numel, count,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MEANS: tl.constexpr, SUM: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index, inside = indices(number, numel, BLOCK, WIDTH)
    numbers = read_sum(first, second, index, inside, SUM, WHOLE)
    length = tl.minimum(numel - number * BLOCK, BLOCK).to(tl.int32)
    above = numbers >= 0
    signs = above.to(tl.int32) if WHOLE else (above & inside).to(tl.int32)
    if MEANS:
        upper = tl.sum(tl.where(above, numbers, 0.0).to(tl.float64), axis=1)
        lower = tl.sum(tl.where(above, 0.0, numbers).to(tl.float64), axis=1)
        found = tl.sum(signs, axis=1)
        high = (upper / tl.maximum(found, 1).to(tl.float64)).to(tl.float32)
        low = (lower / tl.maximum(length - found, 1).to(tl.float64)).to(tl.float32)
        tl.store(header + count + number, low, mask=number < count)
    else:
        high = (tl.sum(tl.abs(numbers).to(tl.float64), axis=1) / tl.maximum(length, 1).to(tl.float64)).to(tl.float32)
        low = -high
    tl.store(header + number, high, mask=number < count)
    write(vector, index, numbers - tl.where(above, high[:, None], low[:, None]), inside, WHOLE)
    write_codes(signs, bits, 0, 0, number * BLOCK, numel, BLOCK, 1, WHOLE)


@kernel
def _decode(
    header, step: tl.int64, bits, stride: tl.int64, out, weight, numel: tl.int64, count,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MEANS: tl.constexpr, ADD: tl.constexpr,
    MESSAGES: tl.constexpr,
):  # fmt: skip
    values = header, step, bits, stride
    if BLOCK == WIDTH and (tl.program_id(0) + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _decode_tile(*values, out, weight, numel, count, BLOCK, WIDTH, ROWS, MEANS, ADD, MESSAGES, True)
    else:
        _decode_tile(*values, out, weight, numel, count, BLOCK, WIDTH, ROWS, MEANS, ADD, MESSAGES, False)


@triton.jit
def _decode_tile(
    header, step: tl.int64, bits, stride: tl.int64, out, weight, numel, count,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MEANS: tl.constexpr, ADD: tl.constexpr,
    MESSAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index, inside = indices(number, numel, BLOCK, WIDTH)
    total = read(out, index, inside, WHOLE) if ADD else tl.zeros([ROWS, WIDTH], tl.float32)
    for message in range(MESSAGES):
        row = header + message * step
        high = tl.load(row + number, mask=number < count, other=0.0) * weight
        low = -high
        if MEANS:
            low = tl.load(row + count + number, mask=number < count, other=0.0) * weight
        signs = read_codes(bits + message * stride, 0, 0, number * BLOCK, numel, BLOCK, WIDTH, 1, WHOLE)
        total += tl.where(signs != 0, high[:, None], low[:, None])
    write(out, index, total, inside, WHOLE)
