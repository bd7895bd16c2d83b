"""CPU kernels of ``signs.py``. Bit-identical to its tensor operations."""

from __future__ import annotations

import numpy as np

from lightning_compress.core.source_numba import begin_write, borrow, end_write, load, part_of, part_of_place
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
def split_signs(source, bits, values, rest):
    """Compute both means of each block and the sign bits; see ``OneBit``.

    Args:
        source: see ``source_numba.py``; blocks whose length is a multiple of 32.
        bits: uint32 ``[blocks * block / 32]``, overwritten.
        values: float32 ``[2, blocks]``, overwritten by the means of the elements >= 0 and of the others.
        rest: float32, as long as the source, overwritten by what is not sent; or empty.

    Returns:
        the largest magnitude in the source's memory; see ``source_numba.largest``.
    """
    most, block = np.int32(0), source[0][3] // values.shape[1]
    room = np.empty(0 if len(rest) else block, np.float32)
    for number in range(values.shape[1]):
        start = number * block
        vector, found = _block(source, start, start + block, room, rest)
        most = max(most, found)
        upper, lower, count = _two_sums(vector)
        high = np.float32(upper / max(count, 1))
        low = np.float32(lower / max(block - count, 1))
        values[0, number] = high
        values[1, number] = low
        _write_bits(vector, bits, start, high, low, len(rest) > 0)
    return most


@kernel
def _block(source, first, last, room, rest):
    """Return a block of a source, in ``rest`` if that is kept, and ``largest`` of it."""
    if len(rest):
        vector = rest[first:last]
        return vector, load(source, first, last, vector)
    return borrow(source, first, last, room)


@kernel
def _write_bits(vector, bits, start, high, low, keep):
    """Write the sign bits of a block, and subtract its values if what is left is kept."""
    for index in range(0, len(vector), 32):
        word = simd.signs(vector, index)
        bits[(start + index) // 32] = word
        if keep:
            simd.add_chosen(vector, index, word, -high, -low)


@kernel
def scale_signs(source, bits, values, rest):
    """Compute the mean magnitude, ``values [1, blocks]``, and the sign bits of each block; see ``split_signs``."""
    most, block = np.int32(0), source[0][3] // values.shape[1]
    room = np.empty(0 if len(rest) else block, np.float32)
    for number in range(values.shape[1]):
        start = number * block
        vector, found = _block(source, start, start + block, room, rest)
        most = max(most, found)
        mean = np.float32(_magnitude(vector) / block)
        values[0, number] = mean
        _write_bits(vector, bits, start, mean, -mean, len(rest) > 0)
    return most


@kernel
def add_signs(bits, high, low, out, accumulate):
    """Sum the decoded messages of several ranks, in order.

    Args:
        bits: uint32 ``[messages, blocks * block / 32]``.
        high: float32 ``[messages, blocks]``, the values of the bits that are 1.
        low: float32 ``[messages, blocks]``, the values of the bits that are 0.
        out: a place, see ``source_numba.py``; ``[blocks * block]``.
        accumulate: add to ``out`` instead of overwriting it.
    """
    block = out[3] // high.shape[1]
    room = np.empty(block, np.float32)
    for number in range(high.shape[1]):
        first = number * block
        part = begin_write(out, first, first + block, room, accumulate)
        if not len(bits) and not accumulate:
            part[:] = 0
        for message in range(len(bits)):
            one, other = high[message, number], low[message, number]
            for index in range(0, block, 32):
                word = bits[message, (first + index) // 32]
                if message == 0 and not accumulate:
                    simd.write_chosen(part, index, word, one, other)
                else:
                    simd.add_chosen(part, index, word, one, other)
        end_write(out, first, first + block, part)


@kernel
def encode_shards(source, rows, messages, kinds, rest):
    """Encode the shards of ``rows``, with one value per block or two; see ``SignPlan.shards``."""
    most = np.int32(0)
    for row in range(len(rows)):
        start, numel, at, blocks, first = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        values = messages[at : at + 4 * kinds * blocks].view(np.float32).reshape(kinds, blocks)
        bits = messages[at + first : at + first + numel // 8].view(np.uint32)
        own, left = part_of(source, start, numel), rest[start : start + numel]
        if kinds == 1:
            most = max(most, scale_signs(own, bits, values, left))
        else:
            most = max(most, split_signs(own, bits, values, left))
        messages[at + 4 * kinds * blocks : at + first] = 0
    return most


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
        add_signs(bits, high, low, part_of_place(out, start, numel), accumulate)
