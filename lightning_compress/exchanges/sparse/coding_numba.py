"""Numbers of which many are 0: a bitmap of the others, and back; see ``coding.py``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel, simd
from lightning_compress.kernels.numba.words import lowest, ones, without_lowest

_TILE = 4096
"""Elements that stay in the nearest cache from when they are zeroed."""


@kernel
def mark(values, bitmap):
    """Write which of float32 ``[n]`` are not 0 as bits of uint32 ``[ceil(n / 32)]``, lowest first; returns how many."""
    count, index = 0, 0
    while index + 32 <= len(values):
        word = simd.nonzero(values, index)
        bitmap[index // 32] = word
        count += ones(word)
        index += 32
    if index < len(values):
        word = np.uint32(0)
        for bit in range(len(values) - index):
            if values[index + bit] != 0:
                word |= np.uint32(1) << np.uint32(bit)
        bitmap[index // 32] = word
        count += ones(word)
    return count


@kernel
def count(bitmap, numel):
    """How many bits are 1; -1 if one is beyond the first ``numel``."""
    total = 0
    for word in bitmap:
        total += ones(word)
    rest = numel % 32
    if rest and bitmap[-1] >> np.uint32(rest):
        return -1
    return total


@kernel
def indices(bitmap, out):
    """Write where bits are 1 to int64 ``[count]``."""
    found = 0
    for number in range(len(bitmap)):
        word = bitmap[number]
        while word:
            out[found] = 32 * number + lowest(word)
            found += 1
            word = without_lowest(word)


@kernel
def take(bitmap, values, out):
    """Write those of float32 ``[n]`` whose bits are 1 side by side, to float32 ``[count]``."""
    found = 0
    for number in range(len(bitmap)):
        word = bitmap[number]
        while word:
            out[found] = values[32 * number + lowest(word)]
            found += 1
            word = without_lowest(word)


@kernel
def spread(bitmap, values, out):
    """Write what ``take`` took to where it was, and 0 everywhere else."""
    found = 0
    for first in range(0, len(out), _TILE):
        last = min(first + _TILE, len(out))
        out[first:last] = 0
        for number in range(first // 32, (last + 31) // 32):
            word = bitmap[number]
            while word:
                out[32 * number + lowest(word)] = values[found]
                found += 1
                word = without_lowest(word)
