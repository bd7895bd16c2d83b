"""CPU kernels of ``rotated.py``, a tile at a time in the nearest cache. Bit-identical to its tensor operations."""

from __future__ import annotations

import numpy as np

from lightning_compress.codecs.quantize.levels_numba import add_row, fit, pack, pack_one, step, unpack_one
from lightning_compress.core.random_numba import shard_state
from lightning_compress.core.source_numba import begin_write, borrow, end_write, load, part_of, part_of_place
from lightning_compress.kernels.numba import kernel, simd

TILE = simd.LANES
"""Blocks that are transformed at a time: the columns of a run."""
_GAMMA = np.uint64(simd.GAMMA)


@kernel
def _transform(tile, count):
    """Walsh-Hadamard transform of the columns of a tile ``[count, TILE]``, in place; see ``rotated.hadamard``."""
    distance = 1
    while 4 * distance <= count:  # two steps per pass
        for first in range(0, count, 4 * distance):
            for row in range(first, first + distance):
                simd.butterflies(tile, row * TILE, distance * TILE)
        distance *= 4
    if distance < count:
        _halves(tile[: distance * TILE], tile[distance * TILE :])


@kernel
def _halves(upper, lower):
    """Do the last step: add and subtract the halves of a tile."""
    for index in range(len(upper)):
        total = upper[index] + lower[index]
        lower[index] = total - np.float32(2) * lower[index]
        upper[index] = total


@kernel
def encode(source, signs, shift, tile, top, limit, start, move, body, places, norms, rest):
    """Encode blocks.

    Args:
        source: see ``source_numba.py``; at most ``len(norms)`` blocks. Zeros replace what the last run lacks.
        signs: float32 ``[rows]``, 1 or -1.
        shift: added to a level to get the number.
        tile: float32 ``[rows * TILE]``; scratch.
        top: the largest number that is sent.
        limit: a larger norm is sent as 0, as is one that is too small; see ``levels.fit``.
        start: uint64, the state before the first random word.
        move: int16, added to the random numbers.
        body: uint8, the planes of the codes; overwritten.
        places: see ``levels_numba.pack``.
        norms: float32 ``[blocks]``, overwritten.
        rest: float32, as long as the source, overwritten by what is not sent; or empty.

    Returns:
        the largest magnitude in the source's memory; see ``source_numba.largest``.
    """
    (_, _, _, numel), _, _ = source
    count, most = len(signs), np.int32(0)
    offset = np.float32(0.5 + 0.5 / 65536 - shift)
    largest = np.empty(TILE, np.float32)
    factors = np.empty(TILE, np.float32)
    room = np.empty(0 if len(rest) else count * TILE, np.float32)
    for block in range(0, len(norms), TILE):
        columns, first = min(TILE, len(norms) - block), block * count
        last = min(first + count * TILE, numel)
        whole = last == first + count * TILE
        if len(rest):
            vector = rest[first:last]
            found = load(source, first, last, vector)
        else:
            vector, found = borrow(source, first, last, room)
        most = max(most, found)
        if whole:
            for row in range(count):
                simd.scale(tile, row * TILE, vector, row * TILE, signs[row] / np.float32(count))
        else:
            _load(tile, signs, vector, columns)
        _transform(tile, count)
        largest[:] = 0
        for row in range(0, count, 4):
            simd.raise_to(largest, 0, tile, row * TILE, TILE)
        for column in range(columns):
            norms[block + column], factors[column] = fit(largest[column], top, limit)
            largest[column] = step(norms[block + column], top)
        if columns < TILE:
            _round_rest(tile, factors, offset, start, move, body, places, first, columns)
        else:
            for row in range(0, count, 2):
                state = start + np.uint64((first + row * TILE) // 4) * _GAMMA
                simd.round_levels(tile, row * TILE, tile, row * TILE, factors, 0, offset, state, move)
                for ahead in (row, row + 1):  # rows of the next run
                    simd.fetch(vector, (count + ahead) * TILE)
            pack(tile[: count * TILE], body, places, first)
        if len(rest):
            for row in range(count):
                simd.to_numbers(tile, row * TILE, largest, 0, np.float32(shift))
            _transform(tile, count)
            _add(vector, tile, signs, columns, whole, np.float32(-1))
    return most


@kernel
def _load(tile, signs, vector, columns):
    """Load the last run, whose rows are shorter than the tile's, and fill up with zeros."""
    tile[:] = 0
    for index in range(len(vector)):
        row, column = divmod(index, columns)
        tile[row * TILE + column] = vector[index] * (signs[row] / np.float32(len(signs)))


@kernel
def _round_rest(tile, factors, offset, start, move, body, places, first, columns):
    """Round the last run to levels, and write its codes; see ``simd.round_levels``."""
    word = np.uint64(0)
    for element in range(len(tile) // TILE * columns):
        row, column = divmod(element, columns)
        index, at = first + element, row * TILE + column
        if index % 4 == 0:
            word = start + np.uint64(index // 4) * _GAMMA
            word = (word ^ (word >> np.uint64(30))) * np.uint64(simd.FACTORS[0])
            word = (word ^ (word >> np.uint64(27))) * np.uint64(simd.FACTORS[1])
            word = word ^ (word >> np.uint64(31))
        random = np.int16(np.int64(word & np.uint64(0xFFFF)) + move)
        word >>= np.uint64(16)
        tile[at] = np.floor(offset + (tile[at] * factors[column] + np.float32(random)) * np.float32(1 / 65536))
        pack_one(np.int32(tile[at]), body, places, index)


@kernel
def _add(vector, tile, signs, columns, whole, factor):
    """Add ``factor`` times a tile, with its signs undone, to a run."""
    if whole:
        for row in range(len(signs)):
            simd.add_scaled(vector, row * TILE, tile, row * TILE, factor * signs[row])
    else:
        for index in range(len(vector)):
            row, column = divmod(index, columns)
            vector[index] += factor * signs[row] * tile[row * TILE + column]


@kernel
def decode(bodies, distance, places, sign, steps, signs, shift, tile, out, accumulate):
    """Sum the decoded blocks of several messages, in order.

    Args:
        bodies: uint8, the memory from the planes of the first message's codes on.
        distance: bytes from one message to the next.
        places: see ``levels_numba.pack``.
        sign: the highest bit of a code.
        steps: float32 ``[messages, blocks]``.
        signs: float32 ``[rows]``, 1 or -1.
        shift: added to a level to get the number.
        tile: float32 ``[rows * TILE]``; scratch.
        out: a place, see ``source_numba.py``; at most this number of blocks.
        accumulate: add to ``out`` instead of overwriting it.
    """
    count, numel = len(signs), out[3]
    room = np.empty(count * TILE, np.float32)
    for block in range(0, steps.shape[1], TILE):
        columns, first = min(TILE, steps.shape[1] - block), block * count
        last = min(first + count * TILE, numel)
        whole = last == first + count * TILE
        part = begin_write(out, first, last, room, accumulate)
        tile[:] = 0
        for message in range(len(steps)):
            body = bodies[message * distance :]
            if columns < TILE:
                _add_rest(tile, body, places, sign, shift, steps[message], block, columns)
            else:
                for row in range(count):
                    index = row * TILE
                    simd.fetch(part, index)
                    add_row(tile, index, body, places, first + index, steps[message], block, shift, sign)
        _transform(tile, count)
        if accumulate:
            _add(part, tile, signs, columns, whole, np.float32(1))
        elif whole:
            for row in range(count):
                simd.scale(part, row * TILE, tile, row * TILE, signs[row])
        else:
            part[:] = 0
            _add(part, tile, signs, columns, whole, np.float32(1))
        end_write(out, first, last, part)


@kernel
def _add_rest(tile, body, places, sign, shift, steps, block, columns):
    """Add the last run's numbers to the tile; see ``add_row``."""
    count = len(tile) // TILE
    for element in range(count * columns):
        row, column = divmod(element, columns)
        index = block * count + element
        code = np.int32(unpack_one(body, places, index))
        level = np.float32((code ^ sign) - sign)
        tile[row * TILE + column] += (level + shift) * steps[block + column]


@kernel
def encode_shards(source, rows, messages, key, signs, shift, tile, top, limit, rest):
    """Encode the shards of ``rows``; see ``LevelPlan.shards`` and ``encode``."""
    most = np.int32(0)
    for row in range(len(rows)):
        start, numel, at, blocks, first = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        norms, state = messages[at : at + 4 * blocks].view(np.float32), shard_state(key, rows[row, 5], rows[row, 6])
        body, places, left = messages[at + first :], rows[row, 7:], rest[start : start + numel]
        random = state, np.int16(0), body, places
        own = part_of(source, start, numel)
        most = max(most, encode(own, signs, shift, tile, top, limit, *random, norms, left))
        messages[at + 4 * blocks : at + first] = 0
    return most


@kernel
def decode_shards(messages, rows, out, weight, accumulate, signs, shift, tile, sign, top):
    """Decode the shards of ``rows``, each from its own message; see ``LevelPlan.shards`` and ``decode``."""
    for row in range(len(rows)):
        start, numel, at, blocks, first = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        norms, steps = messages[at : at + 4 * blocks].view(np.float32), np.empty((1, blocks), np.float32)
        for block in range(blocks):
            steps[0, block] = step(norms[block], top) * weight
        bodies, places = messages[at + first :], rows[row, 7:]
        decode(bodies, 0, places, sign, steps, signs, shift, tile, part_of_place(out, start, numel), accumulate)
