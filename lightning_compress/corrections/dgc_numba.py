"""A step of a velocity and of what it adds up to, in one pass; see ``dgc.py``, whose bits these are."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel

_TILE = 1024
"""Elements that stay in the nearest cache from one loop to the next: a loop over all five arrays is not vectorised."""


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
    """``out = factor * gradient + residual``, of what has no velocity; otherwise as ``accumulate``."""
    largest = np.int32(0)
    for index in range(len(gradient)):
        out[index] = gradient[index] * factor + residual[index]
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest


@kernel
def accumulate(gradient, bits, factor, momentum, nesterov, velocity, residual):
    """``u <- momentum u + factor g`` and ``v <- v + u``; Nesterov: ``u <- momentum (u + factor g)``, ``v += u + g``.

    Args:
        gradient: float32 ``[n]``.
        bits: the same memory as int32.
        factor: float32.
        momentum: float32.
        nesterov: which of the two.
        velocity: two of float32 ``[n]``: from which u is read, and to which it is written.
        residual: likewise for v.

    Returns:
        the largest of the gradient's magnitudes, as the bits of a float32.
    """
    (old, new), (before, after) = velocity, residual
    largest = np.int32(0)
    for first in range(0, len(gradient), _TILE):
        last = min(first + _TILE, len(gradient))
        given, those = gradient[first:last], bits[first:last]
        if nesterov:
            found = _nesterov(given, those, factor, momentum, old[first:last], new[first:last])
            _sum_of_three(given, factor, new[first:last], before[first:last], after[first:last])
        else:
            found = _heavy(given, those, factor, momentum, old[first:last], new[first:last])
            _sum(new[first:last], before[first:last], after[first:last])
        largest = max(largest, found)
    return largest
