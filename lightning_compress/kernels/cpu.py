"""The loops that numba compiles, once a machine; they take contiguous NumPy arrays and let other threads run."""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_compress.kernels import bitmap, levels, lists, momentum, rotation, words

__all__ = [
    "add",
    "add_signs",
    "bitmap",
    "collect",
    "copy",
    "levels",
    "lists",
    "momentum",
    "rotation",
    "scale_signs",
    "split_signs",
]

_kernel = njit(nogil=True, cache=True, error_model="numpy")
_in_any_order = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "nsz"})


@_in_any_order
def _two_sums(values):
    """Of what is >= 0 and of the rest, in float64, and how many are >= 0."""
    upper = lower = 0.0
    count = 0
    for place in range(len(values)):  # by index: iterators are not vectorised
        value = values[place]
        upper += np.float64(max(value, np.float32(0)))
        lower += np.float64(min(value, np.float32(0)))
        count += np.int32(value >= 0)
    return upper, lower, count


@_in_any_order
def _magnitude(values):
    total = 0.0
    for place in range(len(values)):
        total += np.float64(abs(values[place]))
    return total


@_kernel
def split_signs(vector, bits, values):
    """Move the mean of either side of each block out of a vector; see ``OneBit``.

    Args:
        vector: float32 ``[blocks * block]``, a block being a multiple of 32.
        bits: uint32 ``[blocks * block / 32]``, written.
        values: float32 ``[2, blocks]``, written: means of what is >= 0, and of the rest.
    """
    block = len(vector) // values.shape[1]
    for number in range(values.shape[1]):
        start = number * block
        upper, lower, count = _two_sums(vector[start : start + block])
        high = np.float32(upper / max(count, 1))
        low = np.float32(lower / max(block - count, 1))
        values[0, number] = high
        values[1, number] = low
        for place in range(start, start + block, 32):
            word = words.signs(vector, place)
            bits[place // 32] = word
            words.add(vector, place, word, -high, -low)


@_kernel
def scale_signs(vector, bits, values):
    """Move the mean magnitude of each block out of a vector; see ``EFSign``; ``values`` are ``[1, blocks]``."""
    block = len(vector) // values.shape[1]
    for number in range(values.shape[1]):
        start = number * block
        mean = np.float32(_magnitude(vector[start : start + block]) / block)
        values[0, number] = mean
        for place in range(start, start + block, 32):
            word = words.signs(vector, place)
            bits[place // 32] = word
            words.add(vector, place, word, -mean, mean)


@_kernel
def add_signs(bits, high, low, out, accumulate):
    """Sum the messages of several ranks, in their order.

    Args:
        bits: uint32 ``[messages, blocks * block / 32]``.
        high: float32 ``[messages, blocks]``, for the bits that are 1.
        low: likewise, for those that are 0.
        out: float32 ``[blocks * block]``.
        accumulate: add to what is there.
    """
    block = len(out) // high.shape[1]
    if not len(bits) and not accumulate:
        out[:] = 0
    for number in range(high.shape[1]):
        for message in range(len(bits)):
            one, other = high[message, number], low[message, number]
            for place in range(number * block, (number + 1) * block, 32):
                if message == 0 and not accumulate:
                    words.put(out, place, bits[message, place // 32], one, other)
                else:
                    words.add(out, place, bits[message, place // 32], one, other)


@_kernel
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
    for place in range(len(gradient)):
        out[place] = gradient[place] + residual[place]
        largest = max(largest, bits[place] & np.int32(0x7FFFFFFF))
    return largest


@_kernel
def copy(gradient, bits, out):
    """``out = gradient``; otherwise as ``add``."""
    largest = np.int32(0)
    for place in range(len(gradient)):
        out[place] = gradient[place]
        largest = max(largest, bits[place] & np.int32(0x7FFFFFFF))
    return largest


@_kernel
def collect(source, least, first, last, candidates, magnitudes, count):
    """Append the places of ``source[first:last]`` whose magnitude reaches ``least``, and the magnitudes.

    Args:
        source: float32 ``[n]``.
        least: float32, above 0.
        first: where to begin.
        last: where to end.
        candidates: int32, with room for ``count + last - first``.
        magnitudes: float32, as long.
        count: how many there are.

    Returns:
        how many there are then.
    """
    place = first
    while place + 32 <= last:
        word = words.reaching(source, place, least)
        while word:
            found = place + words.lowest(word)
            candidates[count] = found
            magnitudes[count] = abs(source[found])
            count += 1
            word &= word - np.uint32(1)
        place += 32
    while place < last:
        if abs(source[place]) >= least:
            candidates[count] = place
            magnitudes[count] = abs(source[place])
            count += 1
        place += 1
    return count
