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
