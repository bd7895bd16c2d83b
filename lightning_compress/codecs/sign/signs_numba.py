"""CPU kernels of ``signs.py``. Bit-identical to its tensor operations."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import in_any_order, kernel, simd


@in_any_order
def _two_sums(values):
    """Return the sums of the values >= 0 and of the others, in float64, and the number of values >= 0."""
    upper = lower = 0.0
    count = 0
    for index in range(len(values)):  # by index, because iterators are not vectorised
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
    """Compute both means of each block and the sign bits, and subtract the means; see ``OneBit``.

    Args:
        vector: float32 ``[blocks * block]``; ``block`` is a multiple of 32. Afterwards it holds what was not sent.
        bits: uint32 ``[blocks * block / 32]``, overwritten.
        values: float32 ``[2, blocks]``, overwritten by the means of the elements >= 0 and of the others.
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
    """Compute the mean magnitude and the sign bits of each block, and subtract; ``values`` is ``[1, blocks]``."""
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
    """Sum the decoded messages of several ranks, in order.

    Args:
        bits: uint32 ``[messages, blocks * block / 32]``.
        high: float32 ``[messages, blocks]``, the values of the bits that are 1.
        low: float32 ``[messages, blocks]``, the values of the bits that are 0.
        out: float32 ``[blocks * block]``.
        accumulate: add to ``out`` instead of overwriting it.
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


@kernel
def encode_shards(vector, rows, messages, kinds):
    """Encode the shards of ``rows``, with one value per block or two; see ``SignPlan.shards``."""
    for row in range(len(rows)):
        start, numel, at, blocks, first = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        values = messages[at : at + 4 * kinds * blocks].view(np.float32).reshape(kinds, blocks)
        bits = messages[at + first : at + first + numel // 8].view(np.uint32)
        if kinds == 1:
            scale_signs(vector[start : start + numel], bits, values)
        else:
            split_signs(vector[start : start + numel], bits, values)
        messages[at + 4 * kinds * blocks : at + first] = 0


@kernel
def decode_shards(messages, rows, out, weight, accumulate, kinds):
    """Decode the shards of ``rows``, each from its own message; see ``SignPlan.shards`` and ``add_signs``."""
    for row in range(len(rows)):
        start, numel, at, blocks, first = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        values = messages[at : at + 4 * kinds * blocks].view(np.float32).reshape(kinds, blocks)
        high, low = np.empty((1, blocks), np.float32), np.empty((1, blocks), np.float32)
        for block in range(blocks):
            high[0, block] = values[0, block] * weight
            low[0, block] = -high[0, block] if kinds == 1 else values[1, block] * weight
        bits = messages[at + first : at + first + numel // 8].view(np.uint32).reshape(1, -1)
        add_signs(bits, high, low, out[start : start + numel], accumulate)
