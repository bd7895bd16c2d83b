"""GPU kernels of ``bins.py``: choice of the largest coefficients, and coding of their positions.

A row has ``B`` coefficients, a power of two, and one more, the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.kernels.triton.launch import pack, unpack


@triton.jit
def largest(energy, last, KEEP: tl.constexpr):
    """Choose the ``KEEP`` largest coefficients of each row; of equal ones the first are taken.

    Args:
        energy: squared magnitudes of the first B coefficients, float32 ``[ROWS, B]``.
        last: squared magnitude of the last coefficient, float32 ``[ROWS, 1]``.
        KEEP: number of coefficients to choose.

    Returns:
        Which coefficients are chosen, the number of chosen ones before each, int32 ``[ROWS, B]``, and whether the last
        one is chosen.
    """
    bits, extra = energy.to(tl.int32, bitcast=True), last.to(tl.int32, bitcast=True)  # in the order of the numbers
    least = tl.zeros_like(extra)
    bit, going = 1 << 30, True
    while going:  # bit by bit, the largest number that KEEP elements reach; stops when exactly KEEP do
        candidate = least | bit
        found = tl.sum((bits >= candidate).to(tl.int32), axis=1, keep_dims=True)
        found += (extra >= candidate).to(tl.int32)
        least = tl.where(found >= KEEP, candidate, least)
        bit = bit >> 1
        going = (bit > 0) & (tl.max(tl.max((found != KEEP).to(tl.int32), axis=1), axis=0) > 0)
    above, equal = bits > least, bits == least
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    total = tl.sum(both, axis=1, keep_dims=True)
    wanted = KEEP - (total & 0xFFFF) - (extra > least).to(tl.int32)
    before = tl.cumsum(both, axis=1) - both
    same = before >> 16
    chosen = above | (equal & (same < wanted))
    final = (extra > least) | ((extra == least) & (total >> 16 < wanted))
    return chosen, (before & 0xFFFF) + tl.minimum(same, wanted), final


@triton.jit
def write(chosen, before, final, bins, number, inside, KEEP: tl.constexpr, LISTED: tl.constexpr):
    """Write the positions of rows, as a bitmap or as a list; nothing if all coefficients are chosen.

    Args:
        chosen: see ``largest``.
        before: see ``largest``.
        final: whether the last coefficient is chosen, from ``largest``.
        bins: pointer to the positions in the message, uint8.
        number: indices of the rows, int64 ``[ROWS]``.
        inside: which of these rows exist.
        KEEP: see ``largest``.
        LISTED: write a list of 16-bit numbers instead of a bitmap.
    """
    B: tl.constexpr = chosen.shape[1]
    EACH: tl.constexpr = min(8, B)
    SIZE: tl.constexpr = (B + 8) // 8
    row, some = number[:, None], inside[:, None]
    if KEEP == B + 1:
        pass
    elif LISTED:
        target = bins.to(tl.pointer_type(tl.int16)) + row * KEEP
        column = tl.broadcast_to(tl.arange(0, B)[None, :], chosen.shape).to(tl.int16)
        tl.store(target + before, column, mask=chosen & some)
        tl.store(target + (KEEP - 1), tl.full(final.shape, B, tl.int32).to(tl.int16), mask=final & some)
    else:
        target = bins + row * SIZE
        if EACH == 8:
            tl.store(target + tl.arange(0, B // 8)[None, :], pack(chosen.to(tl.int32), 1), mask=some)
            tl.store(target + B // 8, final.to(tl.uint8), mask=some)
        else:  # the last coefficient is in the same byte
            byte = tl.sum(chosen.to(tl.int32) << tl.arange(0, B)[None, :], axis=1, keep_dims=True)
            tl.store(target, (byte + (final.to(tl.int32) << B)).to(tl.uint8), mask=some)


@triton.jit
def read(bins, number, inside, B: tl.constexpr, KEEP: tl.constexpr, LISTED: tl.constexpr):
    """Return what ``largest`` returned. For damaged bytes, fewer than ``KEEP`` may be chosen. See ``write``."""
    EACH: tl.constexpr = min(8, B)
    SIZE: tl.constexpr = (B + 8) // 8
    row, some, column = number[:, None], inside[:, None], tl.arange(0, B)[None, :]
    if KEEP == B + 1:
        before = tl.broadcast_to(column, [number.shape[0], B])
        chosen, final = before >= 0, some
    elif LISTED:
        source = bins.to(tl.pointer_type(tl.int16)) + row * KEEP
        before = _search(source, column, some, KEEP)
        found = tl.load(source + before, mask=some & (before < KEEP), other=-1).to(tl.int32) & 0xFFFF
        chosen = found == column
        chosen = chosen & (before < KEEP)
        final = ((tl.load(source + (KEEP - 1), mask=some, other=0).to(tl.int32) & 0xFFFF) == B) & some
    else:
        source = bins + row * SIZE
        if EACH == 8:
            marks = unpack(tl.load(source + tl.arange(0, B // 8)[None, :], mask=some, other=0), 1)
            final = (tl.load(source + B // 8, mask=some, other=0) & 1) != 0
        else:
            byte = tl.load(source, mask=some, other=0).to(tl.int32)
            marks = (byte >> column) & 1
            final = ((byte >> B) & 1) != 0
        before = tl.cumsum(marks, axis=1) - marks
        chosen = (marks != 0) & (before < KEEP)
    return chosen & some, before, final & some


@triton.jit
def _search(source, column, some, KEEP: tl.constexpr):
    """Return the number of entries of an ascending list that are before each column."""
    before = tl.zeros([some.shape[0], column.shape[1]], tl.int32)
    for step in tl.static_range(16):
        if KEEP >> (15 - step) > 0:
            candidate = before + (1 << (15 - step))
            reach = candidate <= KEEP
            index = tl.load(source + (candidate - 1), mask=some & reach, other=0).to(tl.int32) & 0xFFFF
            before = tl.where(reach & (index < column), candidate, before)
    return before
