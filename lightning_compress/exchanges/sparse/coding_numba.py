"""CPU kernels of ``coding.py``: build a bitmap of the values that are not 0, and read one."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel, simd
from lightning_compress.kernels.numba.words import lowest, ones, without_lowest

_TILE = 4096
"""Elements that stay in the nearest cache after they are set to zero."""


@kernel
def mark(values, bitmap):
    """Write which of float32 ``[n]`` are not 0 as bits of uint32 ``[ceil(n / 32)]``, lowest first; return the count."""
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
    """Return how many bits are 1, or -1 if one is beyond the first ``numel``."""
    total = 0
    for word in bitmap:
        total += ones(word)
    rest = numel % 32
    if rest and bitmap[-1] >> np.uint32(rest):
        return -1
    return total


@kernel
def indices(bitmap, out):
    """Write the indices of 1 bits to int64 ``[count]``."""
    position = 0
    for index in range(len(bitmap)):
        word = bitmap[index]
        while word:
            out[position] = 32 * index + lowest(word)
            position += 1
            word = without_lowest(word)


@kernel
def pack(bitmap, values, out):
    """Write the values, float32 ``[n]``, whose bits are 1 side by side to float32 ``[count]``."""
    position = 0
    for index in range(len(bitmap)):
        word = bitmap[index]
        while word:
            out[position] = values[32 * index + lowest(word)]
            position += 1
            word = without_lowest(word)


@kernel
def spread(bitmap, values, out):
    """Write packed values back to their places, and 0 to all others; undoes ``pack``."""
    position = 0
    for first in range(0, len(out), _TILE):
        last = min(first + _TILE, len(out))
        out[first:last] = 0
        for index in range(first // 32, (last + 31) // 32):
            word = bitmap[index]
            while word:
                out[32 * index + lowest(word)] = values[position]
                position += 1
                word = without_lowest(word)
