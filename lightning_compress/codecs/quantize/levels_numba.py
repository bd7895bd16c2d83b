"""Levels of a norm; see ``levels.py``, whose bits these are."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel

_SMALLEST = np.float32(2.0**-100)

_LARGEST = np.finfo(np.float32).max


@kernel
def fit(largest, top, limit):
    """Norm to send, and factor to multiply with; see ``levels.py``."""
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
    """The distance between two numbers; see ``levels.py``."""
    return min(norm / np.float32(top), np.float32(_LARGEST / top * (1 - 2.0**-22)))


@kernel
def to_codes(levels, codes):
    """Write levels, float32 ``[n]``, as two's complements to uint8 ``[n]``."""
    for index in range(len(codes)):
        codes[index] = np.uint8(np.int32(levels[index]))


@kernel
def to_nibbles(levels, codes):
    """Likewise as two of four bits in each byte, the first one lowest, to uint8 ``[n / 2]``."""
    for index in range(len(codes)):
        low, high = np.int32(levels[2 * index]), np.int32(levels[2 * index + 1])
        codes[index] = np.uint8((low & 15) | (high << 4))
