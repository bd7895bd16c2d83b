"""CPU kernels of ``levels.py``. Bit-identical to its tensor operations."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel

_SMALLEST = np.float32(2.0**-100)

_LARGEST = np.finfo(np.float32).max


@kernel
def fit(largest, top, limit):
    """Return the norm to send and the factor of a block; see ``levels.fit``."""
    norm = min(largest, _LARGEST)
    if norm < _SMALLEST or norm > limit:
        return np.float32(0), np.float32(0)
    exact = 65536.0 * top / np.float64(norm)
    factor = np.float32(exact)
    if np.float64(factor) > exact:
        factor = np.nextafter(factor, np.float32(0))
    return norm, factor


@kernel
def step(norm, top):
    """Return the distance between two numbers; see ``Quantiser.steps``."""
    return min(norm / np.float32(top), np.float32(_LARGEST / top * (1 - 2.0**-22)))


@kernel
def to_codes(levels, codes):
    """Write levels, float32 ``[n]``, as two's complements, uint8 ``[n]``."""
    for index in range(len(codes)):
        codes[index] = np.uint8(np.int32(levels[index]))


@kernel
def to_nibbles(levels, codes):
    """Write levels, float32 ``[n]``, as two's complements of 4 bits, two per byte: uint8 ``[n / 2]``."""
    for index in range(len(codes)):
        low, high = np.int32(levels[2 * index]), np.int32(levels[2 * index + 1])
        codes[index] = np.uint8((low & 15) | (high << 4))
