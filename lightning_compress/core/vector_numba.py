"""Gradients into a vector, with a residual or without; see ``vector.py``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel


@kernel
def add(gradient, bits, residual, out):
    """``out = gradient + residual``.

    Args:
        gradient: float32 ``[n]``.
        bits: the same memory as int32.
        residual: float32 ``[n]``.
        out: float32 ``[n]``, written.

    Returns:
        the largest of the gradient's magnitudes, as the bits of a float32: integers know NaN from a number at once.
    """
    largest = np.int32(0)
    for index in range(len(gradient)):
        out[index] = gradient[index] + residual[index]
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest


@kernel
def copy(gradient, bits, out):
    """``out = gradient``; otherwise as ``add``."""
    largest = np.int32(0)
    for index in range(len(gradient)):
        out[index] = gradient[index]
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest
