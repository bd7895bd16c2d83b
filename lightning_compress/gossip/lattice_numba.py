"""Cells, codes and hashes in one pass, bit-identical to ``lattice.py``."""

from __future__ import annotations

import math

import numpy as np

from lightning_compress.gossip.lattice import BOUND, FACTORS
from lightning_compress.kernels.numba import kernel

_STOCHASTIC = 2
_TILE = 1024  # codes that are unpacked at a time; they stay in the first cache
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
    codes, block, stop = np.empty(_TILE, np.uint8), -1, 0
    hashes[:] = 0
    for start in range(0, len(x), _TILE):
        end, index = min(start + _TILE, len(x)), start
        while index < end:
            while index == stop:  # the next block that is not empty
                block += 1
                stop += sizes[block]
            after = min(stop, end)
            given = draws[index:after] if len(draws) else draws
            found = codes[index - start : after - start]
            hashes[block] += np.int64(_write(x[index:after], 1 / steps[block], given, bits, first + index, found))
            index = after
        codes[end - start :] = 0
        _pack(codes, bits, packed[start * bits >> 3 : end * bits + 7 >> 3])


@kernel
def _write(x, inverse, draws, bits, first, codes):
    total, mask = np.uint64(0), (np.int64(1) << bits) - 1
    for index in range(len(x)):
        scaled = _scale(x[index], inverse)
        cell = np.int64(math.floor(scaled + _draw(draws, index)))
        codes[index] = cell & mask
        total += _word(cell, first + index)
        if not abs(scaled) < BOUND:
            total += np.uint64(1)
    return total


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
def differences(x, step, bits, first, packed, out):
    """Write the differences of cells as codes, and return the hash of the recovered ones and the largest difference."""
    total, largest, codes = np.uint64(0), np.int64(0), np.empty(_TILE, np.uint8)
    for start in range(0, len(x), _TILE):
        part = x[start : start + _TILE]
        place = slice(start * bits >> 3, (start + len(part)) * bits + 7 >> 3)
        _unpack(packed[place], bits, codes)
        word, apart = _subtract(part, 1 / step, bits, first + start, codes[: len(part)])
        total, largest = total + word, max(largest, apart)
        codes[len(part) :] = 0
        _pack(codes, bits, out[place])
    return total, largest


@kernel
def _subtract(x, inverse, bits, first, codes):
    total, largest, half = np.uint64(0), np.int64(0), np.int64(1) << (bits - 1)
    for index in range(len(x)):
        scaled = _scale(x[index], inverse)
        least = _least(scaled, 0.0, 0, bits)
        cell = least + ((np.int64(codes[index]) - least) & (2 * half - 1))
        total += _word(cell, first + index)
        apart = cell - np.int64(math.floor(scaled))
        largest = max(largest, abs(apart))
        codes[index] = min(max(apart, -half), half - 1) + half
    return total, largest


@kernel
def add_differences(packed, bits, factor, x):
    """Add ``factor``, float32, times the differences that codes stand for to ``x``."""
    codes = np.empty(_TILE, np.uint8)
    for start in range(0, len(x), _TILE):
        part = x[start : start + _TILE]
        _unpack(packed[start * bits >> 3 : (start + len(part)) * bits + 7 >> 3], bits, codes)
        _add(codes[: len(part)], np.int32(1) << np.int32(bits - 1), factor, part)


@kernel
def _add(codes, half, factor, x):
    for index in range(len(x)):
        x[index] += np.float32(np.int32(codes[index]) - half) * factor


# The first two branches, of what models are averaged with, are vectorised.


@kernel
def _unpack(packed, bits, codes):
    if bits == 8:
        for index in range(len(packed)):
            codes[index] = packed[index]
    elif bits == 4:
        for index in range(len(packed)):
            codes[2 * index] = packed[index] & np.uint8(15)
            codes[2 * index + 1] = packed[index] >> np.uint8(4)
    else:
        for index in range(8 // bits * len(packed)):
            codes[index] = (packed[index * bits >> 3] >> (index * bits & 7)) & ((1 << bits) - 1)


@kernel
def _pack(codes, bits, packed):
    if bits == 8:
        for index in range(len(packed)):
            packed[index] = codes[index]
    elif bits == 4:
        for index in range(len(packed)):
            packed[index] = codes[2 * index] | np.uint8(codes[2 * index + 1] << np.uint8(4))
    else:
        packed[:] = 0
        for index in range(8 // bits * len(packed)):
            packed[index * bits >> 3] |= np.uint8(codes[index] << (index * bits & 7))
