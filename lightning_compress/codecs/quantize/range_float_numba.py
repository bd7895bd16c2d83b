"""CPU kernels of ``range_float.py``, a block at a time. Bit-identical to its tensor operations.

Each message has a row in a table: the first element of its shard and their number; the message's first byte in memory,
the first byte of its codes in the message, their end, and the message's size; then ``Planes.table``.
"""

from __future__ import annotations

import numpy as np

from lightning_compress.codecs.packing.planes_numba import pack, unpack
from lightning_compress.codecs.quantize import minifloat_numba as minifloat
from lightning_compress.codecs.quantize import range_float
from lightning_compress.core.source_numba import begin_write, borrow, end_write, load, part_of, part_of_place
from lightning_compress.kernels.numba import copy, kernel

TILE = 1024
"""Elements whose codes are packed at a time, in the nearest cache; a multiple of ``minifloat_numba.LANES``."""
_HEAD = 4
"""Words of a message before its ranges."""
_SAMPLE, _SAMPLE_NUMEL = range_float.SAMPLE, range_float.SAMPLE_NUMEL


@kernel
def encode_shards(source, rows, messages, settings, codes, rest):
    """Encode shards.

    Args:
        source: see ``source_numba.py``.
        rows: int64 ``[shards, 6 + 3 * planes]``; see above.
        messages: uint8, the memory that holds all messages.
        settings: a block's elements; bits of a code; bits of mantissa, or -1 for those with the least error on a
            sample; the number of candidates; whether to round to nearest instead of truncating.
        codes: uint32 ``[TILE]``; scratch.
        rest: float32, as long as the source, overwritten by what is not sent; or empty.

    Returns:
        the largest magnitude in the source's memory; see ``source_numba.largest``.
    """
    most = np.int32(0)
    for row in range(len(rows)):
        start, numel, at, body = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3]
        end, size = rows[row, 4], rows[row, 5]
        own, left, planes = part_of(source, start, numel), rest[start : start + numel], rows[row, 6:].reshape(-1, 3)
        head = messages[at : at + body].view(np.int32)
        head[:] = 0
        messages[at + end : at + size] = 0
        head[0] = settings[2] if settings[2] >= 0 else _best(own, settings, codes)
        most = max(most, _encode(own, settings, head, codes, messages[at + body : at + end], planes, left))
    return most


@kernel
def _encode(source, settings, head, codes, body, planes, rest):
    """Encode one message, whose ``head`` holds the bits of mantissa."""
    block, bits, _, _, nearest = settings
    numel, most = source[0][3], np.int32(0)
    blocks = (numel + block - 1) // block
    room = np.empty(0 if len(rest) else min(block, numel), np.float32)
    for number in range(blocks):
        first, last = number * block, min(number * block + block, numel)
        if len(rest):
            vector = rest[first:last]
            found = load(source, first, last, vector)
        else:
            vector, found = borrow(source, first, last, room)
        most = max(most, found)
        upper, lower = minifloat.ends(vector)
        head[_HEAD + number], head[_HEAD + blocks + number] = minifloat.negated(lower), upper
        form = minifloat.fit(bits, head[0], upper, lower, nearest)
        for begin in range(0, last - first, TILE):
            part = vector[begin : min(begin + TILE, last - first)]
            tile = codes[: len(part)]
            minifloat.encode(part, tile, form, minifloat.REST if len(rest) else minifloat.SAME)
            pack(tile, body, planes, first + begin)
    return most


@kernel
def _best(source, settings, codes):
    """Return the bits of mantissa with the least squared error on a sample; see ``minifloat.best_mantissa``."""
    block, bits, _, tried, nearest = settings
    length, whole = min(block, source[0][3]), max(source[0][3] // block, 1)
    room, errors = np.empty(length, np.float32), np.zeros(tried)
    skip, step = (length + _SAMPLE_NUMEL - 1) // _SAMPLE_NUMEL, (whole + _SAMPLE - 1) // _SAMPLE
    given = np.empty((length + skip - 1) // skip, np.float32)
    spare = np.empty_like(given)
    for number in range(0, whole, step):
        vector, _ = borrow(source, number * block, number * block + length, room)
        upper, lower = minifloat.ends(vector)
        for index in range(len(given)):
            given[index] = vector[index * skip]
        for mantissa in range(tried):
            copy(given, spare)
            form = minifloat.fit(bits, mantissa, upper, lower, nearest)
            minifloat.encode(spare, codes[: len(spare)], form, minifloat.REST)
            errors[mantissa] += minifloat.squares(spare)
    return np.argmin(errors) if errors.any() else max(0, bits - 4)


@kernel
def decode(heads, bodies, distance, planes, settings, codes, out, weight, accumulate):
    """Sum decoded messages, in order.

    Args:
        heads: int32 ``[messages, words]``, what is before the codes.
        bodies: uint8, the memory from the first message's codes on.
        distance: bytes from one message to the next.
        planes: ``Planes.table``.
        settings: see ``encode_shards``.
        codes: see ``encode_shards``.
        out: a place, see ``source_numba.py``.
        weight: factor of the sum, float32.
        accumulate: add to ``out`` instead of overwriting it.
    """
    block, bits, _, _, nearest = settings
    numel = out[3]
    blocks, room = (numel + block - 1) // block, np.empty(min(block, numel), np.float32)
    for number in range(blocks):
        first, last = number * block, min(number * block + block, numel)
        part = begin_write(out, first, last, room, accumulate)
        if not accumulate:
            part[:] = 0
        for message in range(len(heads)):
            head = heads[message]
            low, high = head[_HEAD + number], head[_HEAD + blocks + number]
            form = minifloat.fit(bits, head[0], high, low ^ minifloat.SIGN, nearest)
            for begin in range(0, last - first, TILE):
                piece = part[begin : begin + TILE]
                tile = codes[: len(piece)]
                unpack(tile, bodies[message * distance :], planes, first + begin)
                minifloat.decode(tile, piece, form, weight)
        end_write(out, first, last, part)


@kernel
def decode_shards(messages, rows, settings, codes, out, weight, accumulate):
    """Decode the shards of ``rows``, each from its own message; see ``encode_shards`` and ``decode``."""
    for row in range(len(rows)):
        start, numel, at, body, end = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        heads = messages[at : at + body].view(np.int32).reshape(1, -1)
        bodies, planes = messages[at + body : at + end], rows[row, 6:].reshape(-1, 3)
        decode(heads, bodies, end, planes, settings, codes, part_of_place(out, start, numel), weight, accumulate)
