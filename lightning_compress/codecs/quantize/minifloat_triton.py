"""Floats of a few bits over the range of a row; see ``formats.py`` and ``minifloat.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def build(low, high, mantissa, BITS: tl.constexpr, NEAREST: tl.constexpr):
    """The formats of rows, whatever the numbers are.

    Args:
        low: the rows' least values, float32 ``[ROWS]``; above 0 counts as 0.
        high: their largest values; below 0 counts as 0.
        mantissa: bits of mantissa, int32, a scalar.
        BITS: of a code, 2 to 16, or 32.
        NEAREST: round to nearest instead of cutting off.

    Returns:
        shift and half, int32; below, and how many positive and negative values there are, int32 ``[ROWS, 1]``.
    """
    shift = 23 - tl.minimum(tl.maximum(mantissa, 0), 23)
    half = ((1 << shift) >> 1) * NEAREST
    upper, lower = _end(high, half, shift), _end(-low, half, shift)
    below = tl.zeros_like(upper)
    if BITS < 32:  # and with 32 bits there are more codes than floats
        CODES: tl.constexpr = 2**BITS - 1
        lesser, greater = tl.minimum(upper, lower), tl.maximum(upper, lower)
        # Halved before they are added up, as their sum may pass 2^31.
        odd = (lesser & 1) + (greater & 1) - CODES + 1
        below = (lesser >> 1) + (greater >> 1) + (odd >> 1)
        single = greater - CODES
        single += (lesser == single + 1).to(tl.int32)
        below = tl.maximum(tl.where(lesser <= below, single, below), 0)
    positive, negative = tl.maximum(upper - below, 0), tl.maximum(lower - below, 0)
    return shift, half, (below << shift)[:, None], positive[:, None], negative[:, None]


@triton.jit
def _end(magnitude, half, shift):
    """The number of an end of the range: negative floats have negative patterns, and count as 0."""
    FINITE: tl.constexpr = 0x7F7FFFFF
    pattern = tl.minimum(tl.maximum(magnitude.to(tl.int32, bitcast=True), 0), FINITE)
    return tl.minimum(pattern + half, FINITE) >> shift


@triton.jit
def encode(numbers, shift, half, below, positive, negative):
    """Codes of float32 ``[ROWS, n]``, int32 (of 32 bits: as they would be unsigned), and what they stand for."""
    pattern = numbers.to(tl.int32, bitcast=True)
    minus = pattern < 0
    level = _level(pattern & 0x7FFFFFFF, shift, half, below, tl.where(minus, negative, positive))
    sent = value(level, shift, below)
    return tl.where(minus & (level > 0), level + positive, level), tl.where(minus, -sent, sent)


@triton.jit
def error(numbers, shift, half, below, positive, negative):
    """By how much codes miss float32 ``[ROWS, n]``: magnitudes, either sign."""
    pattern = numbers.to(tl.int32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    level = _level(magnitude, shift, half, below, tl.where(pattern < 0, negative, positive))
    return magnitude.to(tl.float32, bitcast=True) - value(level, shift, below)


@triton.jit
def decode(codes, shift, below, positive, negative, BITS: tl.constexpr):
    """The magnitudes that codes stand for, float32, and which are below 0; no codes count as the last one."""
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
    """The ``level``-th magnitude of a format, and 0.0 for level 0."""
    return tl.where(level > 0, below + (level << shift), 0).to(tl.float32, bitcast=True)


@triton.jit
def _level(magnitude, shift, half, below, most):
    return tl.minimum(tl.maximum((magnitude + half - below) >> shift, 0), most)


@triton.jit
def best(errors, SAMPLE: tl.constexpr, TRIED: tl.constexpr):
    """The bits of mantissa, 0 to ``TRIED - 1``, with the least error on all rows of a sample, the fewest among equals.

    Where none has an error, as of zeros, ``TRIED - 3``; see ``minifloat.best_mantissa``.

    Args:
        errors: where sums of squares stand, float64 ``[SAMPLE, TRIED]``, at most 8 and 16.
        SAMPLE: rows.
        TRIED: columns.
    """
    row, mantissa = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
    found = tl.load(errors + row * TRIED + mantissa, mask=(row < SAMPLE) & (mantissa < TRIED), other=0.0)
    total = tl.where(tl.arange(0, 16) < TRIED, tl.sum(found, axis=0), float("inf"))
    return tl.where(tl.sum(found) > 0, tl.argmin(total, axis=0), max(0, TRIED - 3)).to(tl.int32)


@triton.jit
def write_mantissa(message, mantissa):
    """The first 16 bytes of a message: the bits of mantissa as int32, and zeros."""
    byte = tl.arange(0, 16)
    tl.store(message + byte, tl.where(byte < 4, mantissa >> (8 * tl.minimum(byte, 3)), 0).to(tl.uint8))
