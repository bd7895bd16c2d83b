"""CPU kernels of ``qsgd.py``. Bit-identical to its tensor operations."""

from __future__ import annotations

import numpy as np

from lightning_compress.codecs.quantize.levels_numba import add_row, fit, pack, step, subtract
from lightning_compress.core.random_numba import shard_state
from lightning_compress.core.source_numba import begin_write, borrow, end_write, load, part_of, part_of_place
from lightning_compress.kernels.numba import kernel, simd

LANES = simd.LANES
WIDTH = 4 * LANES
"""The length of a bucket must be a multiple of this."""
_TILE = 1024
"""Elements per loop, which stay in the nearest cache; a multiple of ``WIDTH``."""
_GAMMA = np.uint64(simd.GAMMA)
_FIRST, _NOTHING = np.int64(0), np.float32(0)  # a plain 0 would be a type of its own, for which all is compiled again


@kernel
def encode(source, width, top, limit, start, move, body, places, norms, rest):
    """Encode whole buckets.

    Args:
        source: see ``source_numba.py``; ``[buckets * width]``.
        width: elements of a bucket.
        top: the largest level.
        limit: a larger norm is sent as 0, as is one that is too small; see ``levels.fit``.
        start: uint64, the state before the first random word.
        move: int16, added to the random numbers.
        body: uint8, the planes of the codes; overwritten.
        places: see ``levels_numba.pack``.
        norms: float32 ``[buckets]``, overwritten by the largest magnitudes.
        rest: float32, as long as the source, overwritten by what is not sent; or empty.

    Returns:
        the largest magnitude in the source's memory; see ``source_numba.largest``.
    """
    offset, most = np.float32(0.5 + 0.5 / 65536), np.int32(0)
    largest, factors, levels = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(_TILE, np.float32)
    room = np.empty(0 if len(rest) else width, np.float32)
    for bucket in range(len(norms)):
        first = bucket * width
        if len(rest):
            vector = rest[first : first + width]
            found = load(source, first, first + width, vector)
        else:
            vector, found = borrow(source, first, first + width, room)
        most = max(most, found)
        largest[:] = 0
        for index in range(0, width, WIDTH):
            simd.raise_to(largest, 0, vector, index, LANES)
        norms[bucket], factors[:] = fit(largest.max(), top, limit)
        for begin in range(0, width, _TILE):
            end = min(begin + _TILE, width)
            for index in range(begin, end, 2 * LANES):
                state = start + np.uint64((first + index) // 4) * _GAMMA
                simd.round_levels(levels, index - begin, vector, index, factors, 0, offset, state, move)
            pack(levels[: end - begin], body, places, first + begin)
            if len(rest):
                subtract(vector[begin:end], levels, step(norms[bucket], top))
    return most


@kernel
def decode(bodies, distance, places, sign, steps, width, out, accumulate):
    """Sum the decoded buckets of several messages, in order.

    Args:
        bodies: uint8, the memory from the planes of the first message's codes on.
        distance: bytes from one message to the next.
        places: see ``levels_numba.pack``.
        sign: the highest bit of a code.
        steps: float32 ``[messages, buckets]``.
        width: elements of a bucket.
        out: a place, see ``source_numba.py``; ``[buckets * width]``.
        accumulate: add to ``out`` instead of overwriting it.
    """
    step_row, room = np.empty(LANES, np.float32), np.empty(width, np.float32)
    for bucket in range(steps.shape[1]):
        first = bucket * width
        part = begin_write(out, first, first + width, room, accumulate)
        if not accumulate:
            part[:] = 0
        for message in range(len(steps)):
            step_row[:], body = steps[message, bucket], bodies[message * distance :]
            for index in range(0, width, LANES):
                add_row(part, index, body, places, first + index, step_row, _FIRST, _NOTHING, sign)
        end_write(out, first, first + width, part)


@kernel
def encode_shards(source, rows, messages, key, width, top, limit, rest):
    """Encode the shards of ``rows``; see ``LevelPlan.shards`` and ``encode``."""
    most = np.int32(0)
    for row in range(len(rows)):
        start, numel, at, blocks, first = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        norms, state = messages[at : at + 4 * blocks].view(np.float32), shard_state(key, rows[row, 5], rows[row, 6])
        body, places, left = messages[at + first :], rows[row, 7:], rest[start : start + numel]
        own = part_of(source, start, numel)
        most = max(most, encode(own, width, top, limit, state, np.int16(0), body, places, norms, left))
        messages[at + 4 * blocks : at + first] = 0
    return most


@kernel
def decode_shards(messages, rows, out, weight, accumulate, width, sign, top):
    """Decode the shards of ``rows``, each from its own message; see ``LevelPlan.shards`` and ``decode``."""
    for row in range(len(rows)):
        start, numel, at, blocks, first = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        norms, steps = messages[at : at + 4 * blocks].view(np.float32), np.empty((1, blocks), np.float32)
        for block in range(blocks):
            steps[0, block] = step(norms[block], top) * weight
        bodies, places = messages[at + first :], rows[row, 7:]
        decode(bodies, 0, places, sign, steps, width, part_of_place(out, start, numel), accumulate)
