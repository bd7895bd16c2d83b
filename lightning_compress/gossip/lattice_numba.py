"""Cells, codes and hashes in one pass, bit-identical to ``lattice.py``."""

from __future__ import annotations

import math

import numpy as np

from lightning_compress.gossip.lattice import BOUND, FACTORS
from lightning_compress.kernels.numba import kernel

_STOCHASTIC = 2
_FIRST, _SECOND, _THIRD = (np.uint64(each) for each in FACTORS)


@kernel
def _scale(value, inverse):
    scaled = np.float64(value) * inverse
    if not scaled < BOUND:  # true for NaN, too
        return BOUND
    return -BOUND if scaled < -BOUND else scaled


@kernel
def _draw(draws, index):
    return 0.0 if len(draws) == 0 else (np.float64(draws[index]) + 32768.5) / 65536


@kernel
def _least(scaled, shift, rounding, bits):
    offset = 0.0 if rounding == _STOCHASTIC else 0.5 - shift
    return np.int64(math.ceil(scaled - offset)) - (np.int64(1) << (bits - 1))


@kernel
def _cell(packed, index, least, bits):
    place = index * bits
    code = np.int64(packed[place >> 3]) >> (place & 7)
    return least + ((code - least) & ((np.int64(1) << bits) - 1))


@kernel
def _word(cell, place):
    word = np.uint64(cell) * _FIRST + np.uint64(place) * _SECOND
    word ^= word >> np.uint64(32)
    word *= _THIRD
    return word ^ (word >> np.uint64(29))


@kernel
def encode(x, sizes, steps, rounding, draws, bits, first, packed, hashes):
    """Write codes and hashes. ``rounding`` is an index into ``ROUNDINGS``; it is 0 if there are no draws."""
    packed[:] = 0
    mask, start = (np.int64(1) << bits) - 1, np.uint64(0)
    for block in range(len(sizes)):
        total, inverse = np.uint64(0), 1 / steps[block]
        for index in range(start, np.uint64(start + sizes[block])):
            scaled = _scale(x[index], inverse)
            cell = np.int64(math.floor(scaled + _draw(draws, index)))
            place = index * bits
            packed[place >> 3] |= np.uint8((cell & mask) << (place & 7))
            total += _word(cell, first + index)
            if not abs(scaled) < BOUND:
                total += np.uint64(1)
        start += np.uint64(sizes[block])
        hashes[block] = np.int64(total)


@kernel
def hash_cells(x, sizes, steps, rounding, draws, bits, first, packed, hashes):
    """Write the hashes of the cells recovered from codes and ``x``."""
    start = np.uint64(0)
    for block in range(len(sizes)):
        total, inverse = np.uint64(0), 1 / steps[block]
        for index in range(start, np.uint64(start + sizes[block])):
            least = _least(_scale(x[index], inverse), _draw(draws, index), rounding, bits)
            total += _word(_cell(packed, index, least, bits), first + index)
        start += np.uint64(sizes[block])
        hashes[block] = np.int64(total)


@kernel
def move(x, sizes, steps, rounding, draws, bits, codes, weights, extra, moved):
    """Add the weighted differences of cells to ``x`` and ``moved``, and ``extra``; the last two may be empty."""
    start = np.uint64(0)
    for block in range(len(sizes)):
        step = steps[block]
        inverse = 1 / step
        for index in range(start, np.uint64(start + sizes[block])):
            scaled, shift = _scale(x[index], inverse), _draw(draws, index)
            own = np.int64(math.floor(scaled + shift))
            least = _least(scaled, shift, rounding, bits)
            total = 0.0
            for number in range(len(weights)):
                total += weights[number, block] * np.float64(_cell(codes[number], index, least, bits) - own)
            change = step * total if len(extra) == 0 else step * total + extra[index]
            x[index] = np.float32(np.float64(x[index]) + change)
            if len(moved):
                moved[index] = np.float32(np.float64(moved[index]) + change)
        start += np.uint64(sizes[block])


@kernel
def differences(x, step, bits, packed, most, found):
    """Write the differences of cells, and return the hash of the recovered ones and the largest difference."""
    total, largest, inverse = np.uint64(0), np.int64(0), 1 / step
    for index in range(len(x)):
        scaled = _scale(x[index], inverse)
        cell = _cell(packed, index, _least(scaled, 0.0, 0, bits), bits)
        total += _word(cell, index)
        apart = cell - np.int64(math.floor(scaled))
        largest = max(largest, abs(apart))
        found[index] = min(max(apart, -most - 1), most)
    return total, largest
