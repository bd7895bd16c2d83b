"""Stochastic rounding to levels of a norm, and back; the roundings are those of ``levels.py``."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest float32."""
_SMALLEST = tl.constexpr(2.0**-100)
_STEPS = tl.constexpr(3.4028234663852886e38 * (1 - 2.0**-22))


@triton.jit
def fit(norm, TOP: tl.constexpr, LIMIT: tl.constexpr):
    """What to send for norms (float32 or float64), and the factors of their elements, float32 each."""
    sent = tl.minimum(norm, LARGEST).to(tl.float32)
    sent = tl.where((sent < _SMALLEST) | (sent > LIMIT), 0.0, sent)
    exact = 65536.0 * TOP / tl.where(sent == 0, 1.0, sent).to(tl.float64)
    factor = exact.to(tl.float32)
    below = (factor.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    factor = tl.where(factor.to(tl.float64) > exact, below, factor)
    return sent, tl.where(sent == 0, 0.0, factor)


@triton.jit
def step_of(norm, TOP: tl.constexpr):
    """The distance between two numbers of blocks with these norms, float32."""
    step = tl.div_rn(norm, tl.full(norm.shape, TOP, tl.float32))
    return tl.where(step > _STEPS / TOP, _STEPS / TOP, step)


@triton.jit
def round_levels(scaled, random, SHIFT: tl.constexpr):
    """The levels, float32, that random numbers (see ``random_bits``) choose; ``scaled`` are elements times factors."""
    return tl.floor((0.5 + 0.5 / 65536 - SHIFT) + (scaled + random) * (1 / 65536))


@triton.jit
def levels_of(codes, BITS: tl.constexpr):
    """The levels, float32, of two's complements of so many bits, int32."""
    sign: tl.constexpr = 2 ** (BITS - 1)
    return ((codes ^ sign) - sign).to(tl.float32)
