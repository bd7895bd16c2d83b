"""Rotation, rounding and back, tile by tile in the nearest cache; see ``codecs/rotated.py``, whose bits these are."""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_compress.kernels import rows

_kernel = njit(nogil=True, cache=True, error_model="numpy")
TILE = rows.LANES
"""Columns of a matrix that are transformed at a time."""
SIDE = 4
"""Tiles that are read and written together: memory is slow with shorter runs."""
_GAMMA = np.uint64(rows.GAMMA)
_SMALLEST = np.float32(2.0**-100)
_LARGEST = np.finfo(np.float32).max


@_kernel
def _transform(tile, count):
    """Walsh-Hadamard of the columns of a tile ``[count, TILE]``; ``(a + b) - 2 b`` as tensor operations do it."""
    distance = 1
    while 4 * distance <= count:  # two steps at once
        for first in range(0, count, 4 * distance):
            for row in range(first, first + distance):
                rows.butterflies(tile, row * TILE, distance * TILE)
        distance *= 4
    if distance < count:
        for row in range(distance):
            rows.butterfly(tile, row * TILE, distance * TILE)


@_kernel
def _fit(largest, top, limit):
    """Norm to send, and factor to multiply with; see ``codecs/quantise.py``."""
    norm = min(largest, _LARGEST)
    if norm < _SMALLEST or norm > limit:
        return np.float32(0), np.float32(0)
    exact = 65536.0 * top / np.float64(norm)
    factor = np.float32(exact)
    if np.float64(factor) > exact:
        factor = np.nextafter(factor, np.float32(0))
    return norm, factor


@_kernel
def _step(norm, top):
    return min(norm / np.float32(top), np.float32(_LARGEST / top * (1 - 2.0**-22)))


@_kernel
def encode(part, signs, top, shift, limit, start, codes, nibbles, norms, tiles):
    """Move a run of blocks from the vector into codes.

    Args:
        part: float32 ``[rows * columns]``; a block is a column, and columns are a multiple of ``TILE``.
        signs: float32 ``[rows]``, 1 or -1.
        top: the largest number that is sent.
        shift: what is added to a code's level.
        limit: larger norms are sent as 0.
        start: uint64, the state before the first random word.
        codes: uint8 ``[rows * columns]``, written.
        nibbles: write two codes into a byte, so that ``codes`` has half the length.
        norms: float32 ``[columns]``, written.
        tiles: float32 ``[SIDE * rows * TILE]``; scratch.
    """
    count = len(signs)
    columns = len(part) // count
    offset = np.float32(0.5 + 0.5 / 65536 - shift)
    largest = np.empty(TILE, np.float32)
    factors = np.empty(TILE, np.float32)
    size = count * TILE
    for begin in range(0, columns, SIDE * TILE):
        side = min(SIDE, columns // TILE - begin // TILE)
        for row in range(count):
            for number in range(side):
                source = row * columns + begin + number * TILE
                rows.scale(tiles, number * size + row * TILE, part, source, signs[row] / np.float32(count))
        for number in range(side):
            tile, first = tiles[number * size : (number + 1) * size], begin + number * TILE
            _transform(tile, count)
            largest[:] = 0
            for row in range(count):
                rows.raise_to(largest, 0, tile, row * TILE)
            for column in range(TILE):
                norms[first + column], factors[column] = _fit(largest[column], top, limit)
                largest[column] = _step(norms[first + column], top)
            for row in range(count):
                state = start + np.uint64((row * columns + first) // 4) * _GAMMA
                rows.round_levels(tile, row * TILE, factors, 0, offset, state)
                if nibbles:
                    rows.to_nibbles(codes, (row * columns + first) // 2, tile, row * TILE, largest, 0, shift)
                else:
                    rows.to_codes(codes, row * columns + first, tile, row * TILE, largest, 0, shift)
            _transform(tile, count)
        _add(part, tiles, signs, begin, side, -1)


@_kernel
def _add(part, tiles, signs, begin, side, factor):
    """Add tiles that stand side by side to a run of the vector; reading them together is what memory likes."""
    count = len(signs)
    columns = len(part) // count
    for row in range(count):
        for number in range(side):
            target = row * columns + begin + number * TILE
            place = (number * count + row) * TILE
            rows.add_scaled(part, target, tiles, place, np.float32(factor) * signs[row])


@_kernel
def decode(codes, nibbles, sign, shift, steps, signs, part, tiles):
    """Add the blocks of several messages to a run of the vector.

    Args:
        codes: uint8 ``[messages, rows * columns]``, two's complements.
        nibbles: a byte has two of them.
        sign: their highest bit.
        shift: what is added to a level.
        steps: float32 ``[messages, columns]``.
        signs: float32 ``[rows]``.
        part: float32 ``[rows * columns]``.
        tiles: float32 ``[SIDE * rows * TILE]``; scratch.
    """
    count = len(signs)
    columns = len(part) // count
    size = count * TILE
    for begin in range(0, columns, SIDE * TILE):
        side = min(SIDE, columns // TILE - begin // TILE)
        tiles[: side * size] = 0
        for number in range(side):
            tile, first = tiles[number * size : (number + 1) * size], begin + number * TILE
            for message in range(len(codes)):
                for row in range(count):
                    place = row * columns + first
                    if nibbles:
                        place //= 2
                        rows.add_nibbles(tile, row * TILE, codes[message], place, steps[message], first, shift, sign)
                    else:
                        rows.add_codes(tile, row * TILE, codes[message], place, steps[message], first, shift, sign)
            _transform(tile, count)
        _add(part, tiles, signs, begin, side, 1)
