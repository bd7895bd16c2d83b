"""GPU kernels of ``formats.py`` and ``minifloat.py``. Bit-identical to their tensor operations."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def build(low, high, mantissa, BITS: tl.constexpr, NEAREST: tl.constexpr):
    """Return the formats of rows; any inputs are allowed.

    Args:
        low: least value of each row, float32 ``[ROWS]``; values above 0 count as 0.
        high: largest value of each row, float32 ``[ROWS]``; values below 0 count as 0.
        mantissa: bits of mantissa, int32 scalar.
        BITS: bits of a code, 2 to 16, or 32.
        NEAREST: round to nearest instead of truncating.

    Returns:
        shift and half, int32; below, and the numbers of positive and negative values, int32 ``[ROWS, 1]``.
    """
    shift = 23 - tl.minimum(tl.maximum(mantissa, 0), 23)
    half = ((1 << shift) >> 1) * NEAREST
    upper, lower = _end(high, half, shift), _end(-low, half, shift)
    below = tl.zeros_like(upper)
    if BITS < 32:  # with 32 bits there are more codes than floats
        CODES: tl.constexpr = 2**BITS - 1
        lesser, greater = tl.minimum(upper, lower), tl.maximum(upper, lower)
        # Halved before they are added, because the sum may exceed 2^31.
        odd = (lesser & 1) + (greater & 1) - CODES + 1
        below = (lesser >> 1) + (greater >> 1) + (odd >> 1)
        single = greater - CODES
        single += (lesser == single + 1).to(tl.int32)
        below = tl.maximum(tl.where(lesser <= below, single, below), 0)
    positive, negative = tl.maximum(upper - below, 0), tl.maximum(lower - below, 0)
    return shift, half, (below << shift)[:, None], positive[:, None], negative[:, None]


@triton.jit
def _end(magnitude, half, shift):
    """Return the integer of an end of the range; negative floats have negative patterns and count as 0."""
    FINITE: tl.constexpr = 0x7F7FFFFF
    pattern = tl.minimum(tl.maximum(magnitude.to(tl.int32, bitcast=True), 0), FINITE)
    return tl.minimum(pattern + half, FINITE) >> shift


@triton.jit
def encode(numbers, shift, half, below, positive, negative):
    """Return codes and decoded values of float32 ``[ROWS, n]``. Codes are int32; those of 32 bits may wrap below 0."""
    pattern = numbers.to(tl.int32, bitcast=True)
    minus = pattern < 0
    level = _level(pattern & 0x7FFFFFFF, shift, half, below, tl.where(minus, negative, positive))
    sent = value(level, shift, below)
    return tl.where(minus & (level > 0), level + positive, level), tl.where(minus, -sent, sent)


@triton.jit
def error(numbers, shift, half, below, positive, negative):
    """Return the signed errors of the decoded magnitudes of float32 ``[ROWS, n]``."""
    pattern = numbers.to(tl.int32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    level = _level(magnitude, shift, half, below, tl.where(pattern < 0, negative, positive))
    return magnitude.to(tl.float32, bitcast=True) - value(level, shift, below)


@triton.jit
def decode(codes, shift, below, positive, negative, BITS: tl.constexpr):
    """Return decoded magnitudes, float32, and which values are negative. Numbers above the last code count as it."""
    if BITS == 32:
        codes = codes.to(tl.int64) & 0xFFFFFFFF
        codes = tl.minimum(codes, positive.to(tl.int64) + negative)
    else:
        codes = tl.minimum(codes, positive + negative)
    minus = codes > positive
    level = tl.where(minus, codes - positive, codes).to(tl.int32)
    return value(level, shift, below), minus


@triton.jit
def value(level, shift, below):
    """Return the ``level``-th magnitude of a format, and 0.0 for level 0."""
    return tl.where(level > 0, below + (level << shift), 0).to(tl.float32, bitcast=True)


@triton.jit
def _level(magnitude, shift, half, below, most):
    return tl.minimum(tl.maximum((magnitude + half - below) >> shift, 0), most)


@triton.jit
def best(errors, SAMPLE: tl.constexpr, TRIED: tl.constexpr):
    """Return the bits of mantissa, 0 to ``TRIED - 1``, with the least error on a sample; the fewest among equals.

    If there is no error, as for zeros, the result is ``TRIED - 3``; see ``minifloat.best_mantissa``.

    Args:
        errors: pointer to sums of squared errors, float64 ``[SAMPLE, TRIED]``.
        SAMPLE: rows of the sample, at most 8.
        TRIED: candidates, at most 16.
    """
    row, mantissa = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
    found = tl.load(errors + row * TRIED + mantissa, mask=(row < SAMPLE) & (mantissa < TRIED), other=0.0)
    total = tl.where(tl.arange(0, 16) < TRIED, tl.sum(found, axis=0), float("inf"))
    return tl.where(tl.sum(found) > 0, tl.argmin(total, axis=0), max(0, TRIED - 3)).to(tl.int32)


@triton.jit
def write_mantissa(message, mantissa):
    """Write the first 16 bytes of a message: the bits of mantissa as int32, and zeros."""
    byte = tl.arange(0, 16)
    tl.store(message + byte, tl.where(byte < 4, mantissa >> (8 * tl.minimum(byte, 3)), 0).to(tl.uint8))
