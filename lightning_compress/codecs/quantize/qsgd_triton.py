"""Levels of each bucket's norm; see ``qsgd.py``, whose bits these are."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.packing.planes_triton import later_planes, read_codes, write_codes
from lightning_compress.codecs.quantize.levels_triton import LARGEST, fit, levels_of, round_levels, step_of
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
from lightning_compress.kernels.triton.random import random_bits, signed

LONGEST = 8192
"""Elements of a bucket, at most: one program holds it in registers."""
_TILE = 1024
"""Elements that a program handles; several buckets where they are shorter."""
_EACH = 32
"""Elements that a thread holds: with as many, buckets of up to 1024 are one warp's, and no maximum leaves it."""


def encode(
    vector: Tensor, summands: Summands, message: Tensor, state: int, move: int, keep: bool,
    bucket: int, squares: bool, bits: int, body: int,
) -> None:  # fmt: skip
    """Write every bucket's norm, and a code for each element.

    Args:
        vector: float32 ``[n]``; gets what is not sent, of itself or of the summands' sum.
        summands: see ``Summands``.
        message: uint8, wholly overwritten.
        state: before the first random word, 0 to 2^64 - 1.
        move: added to the random bits, -32768 to 32767.
        keep: write the vector; else it is unused.
        bucket: elements that share a norm, at most ``LONGEST``; a multiple of 8.
        squares: the norm is the root of the squares' sum, not the largest magnitude.
        bits: of a code, 2 to 8.
        body: where codes begin in the message.
    """
    count = -(-len(vector) // bucket)
    if not count:
        return
    width, rows, options = _tile(bucket)
    first, second, both = sources(vector, summands)
    header = float_view(message, 0, count)
    parts = header, message[4 * count :], body - 4 * count, message[body:], *later_planes(len(vector), bits)
    shape = bucket, width, rows, bits, squares, both, keep
    grid = (triton.cdiv(count, rows),)
    _encode[grid](first, second, vector, *parts, len(vector), count, signed(state), move or None, *shape, **options)


def decode(
    messages: Tensor, out: Tensor, weight: float, accumulate: bool, bucket: int, squares: bool, bits: int, body: int
) -> None:
    """Write, or add, ``weight`` times the sum of messages ``[M, size]``, whose rows may be strided; see ``encode``."""
    count = -(-len(out) // bucket)
    if not count:
        return
    width, rows, options = _tile(bucket)
    header, codes = float_view(messages, 0, count), messages[:, body:]
    parts = header, header.stride(0), codes, codes.stride(0), *later_planes(len(out), bits)
    shape = bucket, width, rows, bits, accumulate, len(messages)
    _decode[(triton.cdiv(count, rows),)](*parts, out, weight, len(out), count, *shape, **options)


def _tile(bucket: int) -> tuple[int, int, dict[str, Any]]:
    """The width of a tile, how many buckets it has, and options."""
    width = width_of(bucket)
    rows = max(1, _TILE // width)
    return width, rows, OPTIONS | {"num_warps": max(1, rows * width // (32 * _EACH))}


@kernel(do_not_specialize=["padding", "count", "start", "move"])
def _encode(
    first, second, vector, header, gap, padding, body, middle, last, numel: tl.int64, count,
    start: tl.int64, move,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SQUARES: tl.constexpr,
    SUM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    sources = first, second, vector, header, body, middle, last, numel, count, start
    if BLOCK == WIDTH and (number + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _encode_tile(*sources, move, BLOCK, WIDTH, ROWS, BITS, SQUARES, SUM, KEEP, True)
    else:
        _encode_tile(*sources, move, BLOCK, WIDTH, ROWS, BITS, SQUARES, SUM, KEEP, False)
    if number == 0:
        clear(gap, padding)


@triton.jit
def _encode_tile(
    first, second, vector, header, body, middle, last, numel, count, start, move,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SQUARES: tl.constexpr,
    SUM: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index, inside = indices(number, numel, BLOCK, WIDTH)
    top: tl.constexpr = 2 ** (BITS - 1) - 1
    numbers = read_sum(first, second, index, inside, SUM, WHOLE)
    if SQUARES:
        wide = numbers.to(tl.float64)
        norm = tl.sqrt(tl.sum(wide * wide, axis=1))
    else:
        norm = tl.max(tl.abs(numbers), axis=1)
    norm, factor = fit(norm, top, LARGEST)
    tl.store(header + number, norm, mask=number < count)
    level = round_levels(numbers * factor[:, None], random_bits(start, number * BLOCK, move, WIDTH), 0.0)
    codes = level.to(tl.int32)
    if not WHOLE:
        codes = tl.where(inside, codes, 0)
    write_codes(codes, body, middle, last, number * BLOCK, numel, BLOCK, BITS, WHOLE)
    if KEEP:
        write(vector, index, numbers - level * step_of(norm, top)[:, None], inside, WHOLE)


@kernel(do_not_specialize=["count"])
def _decode(
    header, step: tl.int64, body, stride: tl.int64, middle, last, out, weight, numel: tl.int64,
    count,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, ADD: tl.constexpr,
    MESSAGES: tl.constexpr,
):  # fmt: skip
    given = header, step, body, stride, middle, last, out, weight, numel, count
    if BLOCK == WIDTH and (tl.program_id(0) + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _decode_tile(*given, BLOCK, WIDTH, ROWS, BITS, ADD, MESSAGES, True)
    else:
        _decode_tile(*given, BLOCK, WIDTH, ROWS, BITS, ADD, MESSAGES, False)


@triton.jit
def _decode_tile(
    header, step, body, stride, middle, last, out, weight, numel, count,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, ADD: tl.constexpr,
    MESSAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index, inside = indices(number, numel, BLOCK, WIDTH)
    total = read(out, index, inside, WHOLE) if ADD else tl.zeros([ROWS, WIDTH], tl.float32)
    for message in range(MESSAGES):
        norm = tl.load(header + message * step + number, mask=number < count, other=0.0)
        scale = step_of(norm, 2 ** (BITS - 1) - 1) * weight
        own = body + message * stride
        codes = read_codes(own, middle, last, number * BLOCK, numel, BLOCK, WIDTH, BITS, WHOLE)
        total += levels_of(codes, BITS) * scale[:, None]
    write(out, index, total, inside, WHOLE)
