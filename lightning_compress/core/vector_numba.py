"""Copy gradients into a vector, or add a residual to them; see ``vector.py``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel


@kernel
def add(gradient, bits, residual, out):
    """Compute ``out = gradient + residual``.

    Args:
        gradient: float32 ``[n]``.
        bits: the gradient's memory as int32.
        residual: float32 ``[n]``.
        out: float32 ``[n]``, overwritten.

    Returns:
        the gradient's largest magnitude, as the bits of a float32: as integers, NaN and infinity are above all others.
    """
    largest = np.int32(0)
    for index in range(len(gradient)):
        out[index] = gradient[index] + residual[index]
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest


@kernel
def copy(gradient, bits, out):
    """Compute ``out = gradient``; otherwise like ``add``."""
    largest = np.int32(0)
    for index in range(len(gradient)):
        out[index] = gradient[index]
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest
