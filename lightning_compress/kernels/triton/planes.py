"""Codes of 2 to 8 bits in a message, in planes of 8, 4, 2 or 1 bits of all of them; see ``codecs/planes.py``.

Tiles are rows of consecutive codes, each of which begins at a multiple of 8 codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.kernels.triton.launch import pack, read, write


def later_planes(count: int, bits: int) -> tuple[int, int]:
    """Where, after the first byte of ``count`` codes, the planes of two bits and of one bit begin."""
    middle = (count * (bits & 4) + 7) // 8
    return middle, middle + (count * (bits & 2) + 7) // 8


@triton.jit
def write_codes(codes, body, middle, last, first, count, BLOCK: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr):
    """Pack rows of codes.

    Args:
        codes: int32 ``[ROWS, WIDTH]``, of which the lowest ``BITS`` bits count; 0 beyond ``count``.
        body: where the codes begin in the message.
        middle: from ``later_planes``.
        last: likewise.
        first: int64 ``[ROWS]``: the numbers of the rows' first codes.
        count: codes in the message.
        BLOCK: codes of a row.
        BITS: 2 to 8.
        WHOLE: a row has as many codes as the tile is wide, and none is beyond ``count``.
    """
    if BITS == 8:
        place, inside = _bytes(first, count, BLOCK, codes.shape[1], 8)
        write(body, place, codes.to(tl.uint8), inside, WHOLE)
    if BITS & 4:
        place, inside = _bytes(first, count, BLOCK, codes.shape[1], 4)
        write(body, place, pack(codes & 15, 4), inside, WHOLE)
    if BITS & 2:
        place, inside = _bytes(first, count, BLOCK, codes.shape[1], 2)
        write(body + middle, place, pack((codes >> (BITS & 4)) & 3, 2), inside, WHOLE)
    if BITS & 1:
        place, inside = _bytes(first, count, BLOCK, codes.shape[1], 1)
        write(body + last, place, pack((codes >> (BITS & 6)) & 1, 1), inside, WHOLE)


@triton.jit
def read_codes(
    body, middle, last, first, count,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The codes again, int32 ``[ROWS, WIDTH]``, 0 outside; see ``write_codes``."""
    codes = tl.zeros([first.shape[0], WIDTH], tl.int32)
    if BITS == 8:
        place, inside = _bytes(first, count, BLOCK, WIDTH, 8)
        codes = read(body, place, inside, WHOLE).to(tl.int32)
    if BITS & 4:
        place, inside = _bytes(first, count, BLOCK, WIDTH, 4)
        codes = _unpack(read(body, place, inside, WHOLE), 4)
    if BITS & 2:
        place, inside = _bytes(first, count, BLOCK, WIDTH, 2)
        codes |= _unpack(read(body + middle, place, inside, WHOLE), 2) << (BITS & 4)
    if BITS & 1:
        place, inside = _bytes(first, count, BLOCK, WIDTH, 1)
        codes |= _unpack(read(body + last, place, inside, WHOLE), 1) << (BITS & 6)
    return codes


@triton.jit
def _unpack(packed, WIDTH: tl.constexpr):
    """The codes of ``pack``; a reshape, and no index of None, leaves them in the thread that has read their byte."""
    EACH: tl.constexpr = 8 // WIDTH
    parts = tl.reshape(packed, [packed.shape[0], packed.shape[1], 1]).to(tl.int32)
    parts = (parts >> (tl.arange(0, EACH) * WIDTH)[None, None, :]) & (2**WIDTH - 1)
    return tl.reshape(parts, [packed.shape[0], packed.shape[1] * EACH])


@triton.jit
def _bytes(first, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Where the bytes of rows stand in a plane, and whether they are any.

    A thread that has read 16 bytes of numbers has as many codes, and is asked to move no more bytes than these make:
    so that nothing changes threads on the way.
    """
    column = tl.arange(0, WIDTH * BITS // 8)
    place = (first * BITS // 8)[:, None] + column[None, :]
    inside = (column < BLOCK * BITS // 8)[None, :] & (place < (count * BITS + 7) // 8)
    return tl.max_contiguous(place, [1, (BITS + 1) // 2]), inside
