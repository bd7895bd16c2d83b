"""GPU kernels of ``planes.py``: codes of 1 to 16 bits, or 32, in planes.

A tile consists of rows of consecutive codes. Each row starts at a multiple of 8 codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.kernels.triton.launch import pack, read, unpack, write


def later_planes(count: int, bits: int) -> tuple[int, int]:
    """Return the offsets, in bytes, of the planes of 2 bits and of 1 bit of ``count`` codes."""
    middle = count * (bits & 8) // 8 + (count * (bits & 4) + 7) // 8
    return middle, middle + (count * (bits & 2) + 7) // 8


@triton.jit
def write_codes(codes, body, middle, last, first, count, BLOCK: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr):
    """Pack rows of codes.

    Args:
        codes: int32 ``[ROWS, WIDTH]``; only the lowest ``BITS`` bits are used. 0 beyond ``count``.
        body: pointer to the message's codes.
        middle: offset of the plane of 2 bits, from ``later_planes``.
        last: offset of the plane of 1 bit, from ``later_planes``.
        first: int64 ``[ROWS]``, index of each row's first code.
        count: number of codes in the message.
        BLOCK: codes of a row.
        BITS: bits of a code, 1 to 16, or 32.
        WHOLE: every row has ``WIDTH`` codes, and none is beyond ``count``.
    """
    if BITS == 32:
        index, inside = _words(first, count, BLOCK, codes.shape[1])
        write(body.to(tl.pointer_type(tl.int32)), index, codes, inside, WHOLE)
    if BITS == 16:
        index, inside = _words(first, count, BLOCK, codes.shape[1])
        write(body.to(tl.pointer_type(tl.int16)), index, codes.to(tl.int16), inside, WHOLE)
    if BITS & 8:
        index, inside = _bytes(first, count, BLOCK, codes.shape[1], 8)
        write(body, index, codes.to(tl.uint8), inside, WHOLE)
    if BITS & 4:
        four = body + count if BITS & 8 else body
        index, inside = _bytes(first, count, BLOCK, codes.shape[1], 4)
        write(four, index, pack((codes >> (BITS & 8)) & 15, 4), inside, WHOLE)
    if BITS & 2:
        index, inside = _bytes(first, count, BLOCK, codes.shape[1], 2)
        write(body + middle, index, pack((codes >> (BITS & 12)) & 3, 2), inside, WHOLE)
    if BITS & 1:
        index, inside = _bytes(first, count, BLOCK, codes.shape[1], 1)
        write(body + last, index, pack((codes >> (BITS & 14)) & 1, 1), inside, WHOLE)


@triton.jit
def read_codes(
    body, middle, last, first, count,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the codes, int32 ``[ROWS, WIDTH]``, 0 outside. Codes of 32 bits may be negative. See ``write_codes``."""
    codes = tl.zeros([first.shape[0], WIDTH], tl.int32)
    if BITS == 32:
        index, inside = _words(first, count, BLOCK, WIDTH)
        codes = read(body.to(tl.pointer_type(tl.int32)), index, inside, WHOLE)
    if BITS == 16:
        index, inside = _words(first, count, BLOCK, WIDTH)
        codes = read(body.to(tl.pointer_type(tl.int16)), index, inside, WHOLE).to(tl.int32) & 0xFFFF
    if BITS & 8:
        index, inside = _bytes(first, count, BLOCK, WIDTH, 8)
        codes = read(body, index, inside, WHOLE).to(tl.int32)
    if BITS & 4:
        four = body + count if BITS & 8 else body
        index, inside = _bytes(first, count, BLOCK, WIDTH, 4)
        codes |= unpack(read(four, index, inside, WHOLE), 4) << (BITS & 8)
    if BITS & 2:
        index, inside = _bytes(first, count, BLOCK, WIDTH, 2)
        codes |= unpack(read(body + middle, index, inside, WHOLE), 2) << (BITS & 12)
    if BITS & 1:
        index, inside = _bytes(first, count, BLOCK, WIDTH, 1)
        codes |= unpack(read(body + last, index, inside, WHOLE), 1) << (BITS & 14)
    return codes


@triton.jit
def read_code(body, middle, last, index, inside, count, BITS: tl.constexpr):
    """Return codes at any indices of the message, int32, 0 where ``inside`` is false.

    Args:
        body: see ``write_codes``.
        middle: see ``write_codes``.
        last: see ``write_codes``.
        index: int64, indices of the codes.
        inside: which of them to read.
        count: see ``write_codes``.
        BITS: see ``write_codes``.
    """
    codes = tl.zeros(index.shape, tl.int32)
    if BITS == 32:
        codes = tl.load(body.to(tl.pointer_type(tl.int32)) + index, mask=inside, other=0)
    if BITS == 16:
        codes = tl.load(body.to(tl.pointer_type(tl.int16)) + index, mask=inside, other=0).to(tl.int32) & 0xFFFF
    if BITS & 8:
        codes = tl.load(body + index, mask=inside, other=0).to(tl.int32)
    if BITS & 4:
        four = body + count if BITS & 8 else body
        codes |= _part(four, index, inside, 4) << (BITS & 8)
    if BITS & 2:
        codes |= _part(body + middle, index, inside, 2) << (BITS & 12)
    if BITS & 1:
        codes |= _part(body + last, index, inside, 1) << (BITS & 14)
    return codes


@triton.jit
def _part(plane, index, inside, BITS: tl.constexpr):
    byte = tl.load(plane + index * BITS // 8, mask=inside, other=0).to(tl.int32)
    return byte >> (index * BITS % 8).to(tl.int32) & (2**BITS - 1)


@triton.jit
def _bytes(first, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Return the indices of rows' bytes in a plane, and which of them exist.

    A thread that reads 16 bytes of numbers holds their codes. It moves only the bytes of these codes, so that no data
    is exchanged between threads.
    """
    column = tl.arange(0, WIDTH * BITS // 8)
    index = (first * BITS // 8)[:, None] + column[None, :]
    inside = (column < BLOCK * BITS // 8)[None, :] & (index < (count * BITS + 7) // 8)
    return tl.max_contiguous(index, [1, (BITS + 1) // 2]), inside


@triton.jit
def _words(first, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Do the same as ``_bytes`` for words of 16 or 32 bits."""
    column = tl.arange(0, WIDTH)
    index = first[:, None] + column[None, :]
    return tl.max_contiguous(index, [1, 4]), (column < BLOCK)[None, :] & (index < count)
