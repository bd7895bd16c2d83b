"""CPU kernels of ``dgc.py``: velocity and residual in one pass. Bit-identical to its tensor operations."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel

_TILE = 1024
"""Elements per loop, which stay in the nearest cache. One loop over all five arrays would not be vectorised."""


@kernel
def _heavy(gradient, bits, factor, momentum, old, new):
    largest = np.int32(0)
    for index in range(len(gradient)):
        new[index] = old[index] * momentum + gradient[index] * factor
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest


@kernel
def _nesterov(gradient, bits, factor, momentum, old, new):
    largest = np.int32(0)
    for index in range(len(gradient)):
        new[index] = (old[index] + gradient[index] * factor) * momentum
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest


@kernel
def _sum(first, second, out):
    for index in range(len(out)):
        out[index] = first[index] + second[index]


@kernel
def _sum_of_three(gradient, factor, second, third, out):
    for index in range(len(out)):
        out[index] = (gradient[index] * factor + second[index]) + third[index]


@kernel
def add(gradient, bits, factor, residual, out):
    """Write ``out = factor * gradient + residual``, for parameters without a velocity; see ``accumulate``."""
    largest = np.int32(0)
    for index in range(len(gradient)):
        out[index] = gradient[index] * factor + residual[index]
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest


@kernel
def accumulate(gradient, bits, factor, momentum, nesterov, velocity, residual):
    """Update velocity u and residual v: ``u <- momentum u + factor g``, ``v <- v + u``.

    Nesterov: ``u <- momentum (u + factor g)``, ``v <- v + u + factor g``.

    Args:
        gradient: float32 ``[n]``.
        bits: the same memory as int32.
        factor: float32, multiplies the gradient.
        momentum: float32.
        nesterov: use Nesterov's rule.
        velocity: a pair of float32 ``[n]``: u is read from the first and written to the second.
        residual: the same pair for v.

    Returns:
        The largest magnitude of the gradient, as the bits of a float32.
    """
    (old, new), (before, after) = velocity, residual
    largest = np.int32(0)
    for first in range(0, len(gradient), _TILE):
        last = min(first + _TILE, len(gradient))
        tile, tile_bits = gradient[first:last], bits[first:last]
        if nesterov:
            tile_largest = _nesterov(tile, tile_bits, factor, momentum, old[first:last], new[first:last])
            _sum_of_three(tile, factor, new[first:last], before[first:last], after[first:last])
        else:
            tile_largest = _heavy(tile, tile_bits, factor, momentum, old[first:last], new[first:last])
            _sum(new[first:last], before[first:last], after[first:last])
        largest = max(largest, tile_largest)
    return largest
