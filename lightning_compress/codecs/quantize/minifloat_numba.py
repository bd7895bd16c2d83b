"""Floats of N bits for kernels on a CPU; the same bits as ``formats.py`` and ``minifloat.py``.

For each row of values, a kernel calls ``ends``, ``fit`` with what it returns, then ``encode``, ``round_off`` or
``move``, which write codes; ``codecs/packing/planes_numba.py`` packs them. To decode, it calls ``fit`` with the range
that the message holds, and ``decode``. All work on arrays of any length, at any address:

    upper, lower = ends(values)                         # patterns of the largest value, and of the least one negated
    form = fit(bits, mantissa, upper, lower, nearest)   # a tuple: shift, half, below, positive, last
    move(values, codes, form)                           # the values become what is not sent
    decode(codes, out, form, weight)                    # out += weight * decoded

Patterns are a float32's bits as an int32. Codes are uint8 up to 8 bits, uint16 up to 16, else uint32
(``code_kind(bits)``): kernels get an array of them as scratch memory, and are compiled for its dtype. Values are
finite or infinite; NaN is not allowed (no error is raised, and nothing beyond the arrays is read or written).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_compress.codecs.quantize import formats
from lightning_compress.kernels.numba import kernel, simd_codes

LANES = simd_codes.LANES
SIGN = np.int32(-0x80000000)
"""The pattern of -0.0. ``pattern ^ SIGN`` is the pattern of the negated float."""
_FINITE = formats.FINITE


def code_kind(bits: int) -> Any:
    """Return the dtype of unpacked codes in kernels."""
    return np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32


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
def encode(values, codes, form):
    """Write the codes of ``values``, float32 ``[n]``, within the range of their format, to ``codes [n]``."""
    shift, half, below, positive, _ = form
    given = np.int32(shift), np.int32(half), np.int32(below), np.int32(positive)
    whole = len(values) // LANES * LANES
    for at in range(0, whole, LANES):
        simd_codes.encode(codes, at, values, at, *given)
    if whole < len(values):
        row, found = _last_row(values, codes)
        simd_codes.encode(found, 0, row, 0, *given)
        codes[whole:] = found[: len(codes) - whole]


@kernel
def round_off(values, codes, form):
    """Do ``encode``, and overwrite the values by the decoded ones, which may be -0.0."""
    shift, half, below, positive, _ = form
    given = np.int32(shift), np.int32(half), np.int32(below), np.int32(positive)
    whole = len(values) // LANES * LANES
    for at in range(0, whole, LANES):
        simd_codes.encode_rounding(codes, at, values, at, *given)
    if whole < len(values):
        row, found = _last_row(values, codes)
        simd_codes.encode_rounding(found, 0, row, 0, *given)
        codes[whole:], values[whole:] = found[: len(codes) - whole], row[: len(codes) - whole]


@kernel
def move(values, codes, form):
    """Do ``encode``, and subtract the decoded values from the values, exactly."""
    shift, half, below, positive, _ = form
    given = np.int32(shift), np.int32(half), np.int32(below), np.int32(positive)
    whole = len(values) // LANES * LANES
    for at in range(0, whole, LANES):
        simd_codes.encode_moving(codes, at, values, at, *given)
    if whole < len(values):
        row, found = _last_row(values, codes)
        simd_codes.encode_moving(found, 0, row, 0, *given)
        codes[whole:], values[whole:] = found[: len(codes) - whole], row[: len(codes) - whole]


@kernel
def _last_row(values, codes):
    """Return a copy of the values that do not fill a row, and room for their codes."""
    row, whole = np.zeros(LANES, np.float32), len(values) // LANES * LANES
    row[: len(values) - whole] = values[whole:]
    return row, np.zeros(LANES, codes.dtype)


@kernel
def decode(codes, out, form, weight):
    """Compute ``out += weight * decoded``; ``out`` is float32 ``[n]``. Numbers above the last code count as it."""
    shift, _, below, positive, last = form
    given = np.int32(shift), np.int32(below), np.int32(positive), np.int32(last), np.float32(weight)
    whole = len(codes) // LANES * LANES
    for at in range(0, whole, LANES):
        simd_codes.add_values(out, at, codes, at, *given)
    if whole < len(codes):
        row, found = _last_row(out, codes)
        found[: len(codes) - whole] = codes[whole:]
        simd_codes.add_values(row, 0, found, 0, *given)
        out[whole:] = row[: len(codes) - whole]
