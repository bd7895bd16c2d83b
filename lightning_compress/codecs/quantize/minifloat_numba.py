"""Floats of N bits for kernels on a CPU; the same bits as ``formats.py`` and ``minifloat.py``.

For each row of values, a kernel calls ``ends``, ``fit`` with what it returns, then ``encode``, which writes codes;
``codecs/packing/planes_numba.py`` packs them. To decode, it calls ``fit`` with the range that the message holds, and
``decode``. All work on arrays of any length, at any address:

    upper, lower = ends(values)                         # patterns of the largest value, and of the least one negated
    form = fit(bits, mantissa, upper, lower, nearest)   # a tuple: shift, half, below, positive, last
    encode(values, codes, form, REST)                   # the values become what is not sent
    decode(codes, out, form, weight)                    # out += weight * decoded

Patterns are a float32's bits as an int32. Codes are uint32, of any bits: kernels get an array of them as scratch
memory. Values are finite or infinite; NaN is not allowed (no error is raised, and nothing beyond the arrays is read or
written).
"""

from __future__ import annotations

import numpy as np

from lightning_compress.codecs.quantize import formats
from lightning_compress.kernels.numba import copy, in_any_order, kernel, simd_codes

LANES = simd_codes.LANES
SIGN = np.int32(-0x80000000)
"""The pattern of -0.0. ``pattern ^ SIGN`` is the pattern of the negated float."""
SAME, ROUNDED, REST = 0, 1, 2
"""What ``encode`` makes of the values."""
_FINITE = formats.FINITE


@kernel
def ends(values):
    """Return the patterns of a row's range, int32: of its largest value, and of its least value negated.

    A value that would be below 0 is 0. The first is the pattern of ``hi`` in a message; ``negated`` of the other is
    that of ``lo``.
    """
    upper, lower, bits = np.int32(0), np.int32(0), values.view(np.int32)
    for index in range(len(bits)):  # as whole numbers, negative floats are below 0
        upper = np.int32(max(upper, bits[index]))
        lower = np.int32(max(lower, np.int32(bits[index] ^ SIGN)))
    return upper, lower


@kernel
def negated(pattern):
    """Return the pattern of the negated float, int32; 0.0 stays 0.0. It is its own inverse, but for -0.0."""
    return np.int32(pattern ^ SIGN) if pattern != 0 else np.int32(0)


@kernel
def fit(bits, mantissa, upper, lower, nearest):
    """Return the format for a range; see ``formats.build``.

    Args:
        bits: bits of a code, 2 to 16, or 32.
        mantissa: bits of mantissa, clamped to 0 to 23.
        upper: pattern of the largest value, int32. Any pattern is allowed; one below 0 counts as 0.0.
        lower: pattern of the least value negated; see ``upper``.
        nearest: round to nearest; otherwise truncate.

    Returns:
        ``shift``, ``half``, ``below``, ``positive`` and ``last`` of ``Formats``, int64.
    """
    shift = np.int64(23 - min(max(mantissa, 0), 23))
    half = np.int64(1 << shift >> 1) if nearest else np.int64(0)
    high = min(min(max(np.int64(upper), 0), _FINITE) + half, _FINITE) >> shift
    low = min(min(max(np.int64(lower), 0), _FINITE) + half, _FINITE) >> shift
    codes = (np.int64(1) << bits) - 1
    lesser, greater = min(high, low), max(high, low)
    below = (lesser + greater - codes + 1) >> 1
    if lesser <= below:  # only one sign has codes
        below = greater - codes
        below += lesser == below + 1  # otherwise the lesser sign would have one code too many
    below = max(below, 0)
    positive, negative = max(high - below, 0), max(low - below, 0)
    return shift, half, below << shift, positive, positive + negative


@kernel
def encode(values, codes, form, left):
    """Write the codes of ``values``, float32 ``[n]``, within the range of their format, to ``codes [n]``.

    ``left`` is what becomes of the values: ``SAME`` leaves them, ``ROUNDED`` overwrites them by the decoded ones, which
    may be -0.0, and ``REST`` subtracts the decoded ones, exactly.
    """
    shift, half, below, positive, _ = form
    given = np.int32(shift), np.int32(half), np.int32(below), np.int32(positive)
    whole = len(values) // LANES * LANES
    for at in range(0, whole, LANES):
        if left == REST:
            simd_codes.encode_moving(codes, at, values, at, *given)
        elif left == ROUNDED:
            simd_codes.encode_rounding(codes, at, values, at, *given)
        else:
            simd_codes.encode(codes, at, values, at, *given)
    if whole < len(values):
        row, found = _last_row(values)
        if left == REST:
            simd_codes.encode_moving(found, 0, row, 0, *given)
        else:
            simd_codes.encode_rounding(found, 0, row, 0, *given)
        for index in range(whole, len(values)):
            codes[index] = found[index - whole]
            if left != SAME:
                values[index] = row[index - whole]


@in_any_order
def squares(values):
    """Return the sum of squares of float32 values, in float64, as far as the order of its terms does not matter."""
    total = 0.0
    for index in range(len(values)):
        total += np.float64(values[index]) * np.float64(values[index])
    return total


@kernel
def _last_row(values):
    """Return a copy of the values that do not fill a row, and room for their codes."""
    row, whole = np.zeros(LANES, np.float32), len(values) // LANES * LANES
    copy(values[whole:], row)
    return row, np.zeros(LANES, np.uint32)


@kernel
def decode(codes, out, form, weight):
    """Compute ``out += weight * decoded``; ``out`` is float32 ``[n]``. Numbers above the last code count as it."""
    shift, _, below, positive, last = form
    given = np.int32(shift), np.int32(below), np.int32(positive), np.int32(last), np.float32(weight)
    whole = len(codes) // LANES * LANES
    for at in range(0, whole, LANES):
        simd_codes.add_values(out, at, codes, at, *given)
    if whole < len(codes):
        row, found = _last_row(out)
        copy(codes[whole:], found)
        simd_codes.add_values(row, 0, found, 0, *given)
        copy(row[: len(codes) - whole], out[whole:])
