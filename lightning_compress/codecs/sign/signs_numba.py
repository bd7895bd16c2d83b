"""A sign for each element and one or two values for each block; see ``signs.py``, whose bits these are."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import in_any_order, kernel, simd


@in_any_order
def _two_sums(values):
    """Of what is >= 0 and of the rest, in float64, and how many are >= 0."""
    upper = lower = 0.0
    count = 0
    for index in range(len(values)):  # by index: iterators are not vectorised
        value = values[index]
        upper += np.float64(max(value, np.float32(0)))
        lower += np.float64(min(value, np.float32(0)))
        count += np.int32(value >= 0)
    return upper, lower, count


@in_any_order
def _magnitude(values):
    total = 0.0
    for index in range(len(values)):
        total += np.float64(abs(values[index]))
    return total


@kernel
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
        for index in range(start, start + block, 32):
            word = simd.signs(vector, index)
            bits[index // 32] = word
            simd.add_chosen(vector, index, word, -high, -low)


@kernel
def scale_signs(vector, bits, values):
    """Move the mean magnitude of each block out of a vector; see ``EFSign``; ``values`` are ``[1, blocks]``."""
    block = len(vector) // values.shape[1]
    for number in range(values.shape[1]):
        start = number * block
        mean = np.float32(_magnitude(vector[start : start + block]) / block)
        values[0, number] = mean
        for index in range(start, start + block, 32):
            word = simd.signs(vector, index)
            bits[index // 32] = word
            simd.add_chosen(vector, index, word, -mean, mean)


@kernel
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
            for index in range(number * block, (number + 1) * block, 32):
                if message == 0 and not accumulate:
                    simd.write_chosen(out, index, bits[message, index // 32], one, other)
                else:
                    simd.add_chosen(out, index, bits[message, index // 32], one, other)
