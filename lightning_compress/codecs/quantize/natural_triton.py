"""Rounding to powers of two, a byte each; see ``natural.py``, whose bits these are."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import (
    OPTIONS,
    Summands,
    clear,
    kernel,
    read,
    read_sum,
    sources,
    width_of,
    write,
)
from lightning_compress.kernels.triton.random import moved, random16, signed

LONGEST = 8192
"""Elements of a bucket, at most: one program holds it in registers."""
_TILE = 2048
"""Elements that a program handles; several buckets where they are shorter."""
_MANTISSA = tl.constexpr(23)
_WINDOW = tl.constexpr(127)


def encode(
    vector: Tensor, summands: Summands, message: Tensor, state: int, move: int, bucket: int, body: int, keep: bool
) -> None:
    """Move every element's power of two, as rounded at random, into the message.

    Args:
        vector: float32 ``[n]``; gets what stays, if that is to be kept.
        summands: see ``Summands``.
        message: uint8, wholly overwritten.
        state: before the stream's first random word.
        move: added to the random bits, -32768 to 32767.
        bucket: elements that share a base, at most ``LONGEST``; a multiple of 8.
        body: where the codes begin in the message.
        keep: whether what stays is asked for.
    """
    count = triton.cdiv(len(vector), bucket)
    if not count:
        return
    width, rows, options = _tile(bucket)
    first, second, both = sources(vector, summands)
    parts = message, body - count, message[body:], signed(state), move or None, len(vector), count
    shape = bucket, width // 4, rows, both, keep
    _encode[(triton.cdiv(count, rows),)](first, second, vector, *parts, *shape, **options)


def decode(messages: Tensor, out: Tensor, weight: float, accumulate: bool, bucket: int, body: int) -> None:
    """Write, or add, ``weight`` times the sum of messages ``[M, size]``, whose rows may be strided; see ``encode``."""
    count = triton.cdiv(len(out), bucket)
    if not count:
        return
    width, rows, options = _tile(bucket)
    parts = messages, messages.stride(0), messages[:, body:], out, weight, len(out), count
    shape = bucket, width // 4, rows, accumulate, len(messages)
    _decode[(triton.cdiv(count, rows),)](*parts, *shape, **options)


def _tile(bucket: int) -> tuple[int, int, dict[str, Any]]:
    """The width of a tile, how many buckets it has, and the warps that hold 16 elements a thread."""
    width = width_of(bucket)
    return width, max(1, _TILE // width), OPTIONS | {"num_warps": 4 * max(1, width // _TILE)}


@kernel(do_not_specialize=["padding", "state", "move", "numel", "count"])
def _encode(
    first, second, vector, bases, padding, codes, state: tl.int64, move, numel, count,
    BUCKET: tl.constexpr, QUADS: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    given = first, second, vector, bases, codes, state, numel, count
    if BUCKET == 4 * QUADS and (number + 1).to(tl.int64) * (ROWS * BUCKET) <= numel:
        _encode_tile(*given, move, BUCKET, QUADS, ROWS, SUM, KEEP, True)
    else:
        _encode_tile(*given, move, BUCKET, QUADS, ROWS, SUM, KEEP, False)
    if number == 0:
        clear(bases + count, padding)


@triton.jit
def _encode_tile(
    first, second, vector, bases, codes, state, numel, count, move,
    BUCKET: tl.constexpr, QUADS: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start, index, inside = _indices(numel, BUCKET, QUADS, ROWS)
    numbers = read_sum(first + start, second + start, index, inside, SUM, WHOLE)
    word = start // 4 + ((tl.arange(0, ROWS) * (BUCKET // 4))[:, None] + tl.arange(0, QUADS)[None, :])
    # odd multiples of 2^7 do not carry into the exponent of what is a power of two already
    noise = (moved(random16(state, word), move).to(tl.int32) & 0xFFFF | 1) << (_MANTISSA - 16)
    top = (numbers.to(tl.int32, bitcast=True) + noise) >> _MANTISSA
    code = tl.minimum(top & 0xFF, 2 * _WINDOW)  # 2^128 is no float32
    base = tl.maximum(tl.max(tl.max(code, axis=2), axis=1), _WINDOW) - _WINDOW
    tl.store(bases + number, base.to(tl.uint8), mask=number < count)
    code = (tl.maximum(code, base[:, None, None]) - base[:, None, None]) | ((top >> 1) & 0x80)
    if KEEP:
        write(vector + start, index, numbers - _values(code) * _powers(base)[:, None, None], inside, WHOLE)
    write(codes + start, index, code.to(tl.uint8), inside, WHOLE)


@triton.jit
def _indices(numel, BUCKET: tl.constexpr, QUADS: tl.constexpr, ROWS: tl.constexpr):
    """Where a program starts, where its elements stand from there, by fours of a random word, and whether they are any.

    Returns:
        int64, and int32 and booleans ``[ROWS, QUADS, 4]``.
    """
    start = tl.program_id(0).to(tl.int64) * (ROWS * BUCKET)
    column = tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    index = (tl.arange(0, ROWS) * BUCKET)[:, None, None] + column[None, :, :]
    left = tl.minimum(numel - start, ROWS * BUCKET).to(tl.int32)
    return start, index, (column < BUCKET)[None, :, :] & (index < left)


@triton.jit
def _values(code):
    """The codes' numbers where the base is 0: c, with a sign in bit 7, stands for float32's bits of 2^(c - 127)."""
    return (((code & _WINDOW) << _MANTISSA) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _powers(exponents):
    """2 to the power of numbers from 0 to 127, exactly."""
    return ((exponents + 127) << _MANTISSA).to(tl.float32, bitcast=True)


@kernel(do_not_specialize=["numel", "count"])
def _decode(
    bases, stride: tl.int64, codes, out, weight, numel, count,
    BUCKET: tl.constexpr, QUADS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, MESSAGES: tl.constexpr,
):  # fmt: skip
    if BUCKET == 4 * QUADS and (tl.program_id(0) + 1).to(tl.int64) * (ROWS * BUCKET) <= numel:
        _decode_tile(bases, stride, codes, out, weight, numel, count, BUCKET, QUADS, ROWS, ADD, MESSAGES, True)
    else:
        _decode_tile(bases, stride, codes, out, weight, numel, count, BUCKET, QUADS, ROWS, ADD, MESSAGES, False)


@triton.jit
def _decode_tile(
    bases, stride, codes, out, weight, numel, count,
    BUCKET: tl.constexpr, QUADS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, MESSAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start, index, inside = _indices(numel, BUCKET, QUADS, ROWS)
    total = read(out + start, index, inside, WHOLE) if ADD else tl.zeros([ROWS, QUADS, 4], tl.float32)
    for message in range(MESSAGES):
        base = tl.load(bases + message * stride + number, mask=number < count, other=0).to(tl.int32)
        power = _powers(base & _WINDOW) * weight
        code = read(codes + message * stride + start, index, inside, WHOLE).to(tl.int32)
        total += _values(code) * power[:, None, None]
    write(out + start, index, total, inside, WHOLE)
