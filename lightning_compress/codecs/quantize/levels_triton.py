"""GPU kernels of ``levels.py``. Bit-identical to its tensor operations."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest float32."""
_FINEST = tl.constexpr(2.0**-111)
_STEPS = tl.constexpr(3.4028234663852886e38 * (1 - 2.0**-22))


@triton.jit
def fit(norm, TOP: tl.constexpr, LIMIT: tl.constexpr):
    """Return norms to send and factors of blocks, float32, from float32 or float64 norms; see ``levels.fit``."""
    sent = tl.minimum(norm, LARGEST).to(tl.float32)
    sent = tl.where((sent < _FINEST * TOP) | (sent > LIMIT), 0.0, sent)
    exact = 65536.0 * TOP / tl.where(sent == 0, 1.0, sent).to(tl.float64)
    factor = exact.to(tl.float32)
    below = (factor.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    factor = tl.where(factor.to(tl.float64) > exact, below, factor)
    return sent, tl.where(sent == 0, 0.0, factor)


@triton.jit
def step_of(norm, TOP: tl.constexpr):
    """Return the distance between two numbers of blocks with these norms, float32."""
    step = tl.div_rn(norm, tl.full(norm.shape, TOP, tl.float32))
    return tl.where(step > _STEPS / TOP, _STEPS / TOP, step)


@triton.jit
def round_levels(scaled, random, SHIFT: tl.constexpr):
    """Return levels, float32. ``scaled`` are elements times factors, ``random`` comes from ``random_bits``."""
    return tl.floor((0.5 + 0.5 / 65536 - SHIFT) + (scaled + random) * (1 / 65536))


@triton.jit
def levels_of(codes, BITS: tl.constexpr):
    """Return the levels, float32, of two's complements of ``BITS`` bits, int32."""
    sign: tl.constexpr = 2 ** (BITS - 1)
    return ((codes ^ sign) - sign).to(tl.float32)
