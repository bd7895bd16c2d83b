"""CPU kernels of ``entropy.py``. Levels are those of ``qsgd_numba.py``, bit for bit."""

from __future__ import annotations

import numpy as np

from lightning_compress.codecs.quantize.entropy import LIMIT, ROW, STREAMS
from lightning_compress.codecs.quantize.levels_numba import fit, step, subtract
from lightning_compress.core.source_numba import begin_write, borrow, end_write, load
from lightning_compress.kernels.numba import kernel, simd, simd_pairs

LANES = simd.LANES
_GAMMA = np.uint64(simd.GAMMA)
_MASK = np.uint64((1 << LIMIT) - 1)
_THREE, _FOUR, _SEVEN, _LENGTH = np.uint64(3), np.uint64(4), np.uint64(7), np.uint64(15)
_ROW, _STREAMS = ROW, STREAMS
"""See ``entropy.py``; ``_take`` decodes four streams."""


@kernel
def encode(
    source, width, padded, top, limit, start, move, raw, codes, bounds, norms, chosen, low, lengths, body, rest
):  # fmt: skip
    """Encode buckets; see ``EntropyPlan`` and ``qsgd_numba.encode``.

    Args:
        source: see ``source_numba.py``; the last bucket may be shorter.
        width: elements of a bucket.
        padded: of them with the zeros behind.
        top: the largest level.
        limit: see ``levels.fit``.
        start: uint64, the state before the first random word.
        move: int16, added to the random numbers.
        raw: how many bits of a level are not coded.
        codes: see ``Tables.encode``.
        bounds: see ``Tables.bounds``.
        norms: float32 ``[buckets]``, overwritten.
        chosen: uint8 ``[buckets]``, overwritten by the tables.
        low: uint8, overwritten by the lowest bits.
        lengths: int32 ``[STREAMS]``, overwritten.
        body: uint8, overwritten by the streams and the zeros behind.
        rest: float32, as long as the source, overwritten by what is not sent; or empty.

    Returns:
        the largest magnitude in the source's memory; see ``source_numba.largest``.
    """
    (_, _, _, numel), _, _ = source
    offset, most, count = np.float32(0.5 + 0.5 / 65536), np.int32(0), len(norms)
    largest, factors = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    levels, tile, pairs = np.empty(padded, np.float32), np.zeros(padded, np.float32), np.empty(padded // 2, np.uint8)
    room, byte = np.empty(0 if len(rest) else width, np.float32), np.int64(0)
    for stream in range(_STREAMS):
        begin, bits, held = byte, np.uint64(0), np.uint64(0)
        for bucket in range(count * stream // _STREAMS, count * (stream + 1) // _STREAMS):
            first, last = bucket * width, min((bucket + 1) * width, numel)
            some = padded if last - first == width else (last - first + _ROW - 1) // _ROW * _ROW
            if len(rest):
                given = rest[first:last]
                found = load(source, first, last, given)
            else:
                given, found = borrow(source, first, last, room)
            most, vector = max(most, found), given
            if last - first < some:
                tile[: last - first] = given
                tile[last - first : some] = 0
                vector = tile
            largest[:] = 0
            for index in range(0, some, 4 * LANES):
                simd.raise_to(largest, 0, vector, index, LANES)
            norms[bucket], factors[:] = fit(largest.max(), top, limit)
            for index in range(0, some, 2 * LANES):
                state = start + np.uint64((first + index) // 4) * _GAMMA
                simd.round_levels(levels, index, vector, index, factors, 0, offset, state, move)
            _write_low(low, bucket * (padded // 8 * raw), levels[:some], raw)
            for index in range(0, some, LANES):
                simd.write_4(pairs, index // 2, levels, index, np.uint8(raw))
            table = _table_for(levels[:some], bounds)
            byte, bits, held, table = _put(pairs[: some // 2], codes, table, body, byte, bits, held)
            chosen[bucket] = table
            if len(rest):
                subtract(given, levels, step(norms[bucket], top))
        if held:
            body[byte] = np.uint8(bits)
            byte += 1
        lengths[stream] = byte - begin
    simd_pairs.store_word(body, byte, np.uint64(0))
    return most


@kernel
def _table_for(levels, bounds):
    """Return the table for levels of this mean magnitude."""
    sums = np.zeros(LANES, np.float32)
    for index in range(0, len(levels), LANES):
        for lane in range(LANES):
            sums[lane] += abs(levels[index + lane])
    mean, table = sums.sum() / np.float32(len(levels)), 0
    for bound in bounds:
        table += mean > bound
    return table


@kernel
def _write_low(low, at, levels, raw):
    """Write the lowest ``raw`` bits of a bucket's levels in planes of 4, 2 and 1 bits."""
    width, begin = len(levels), np.uint8(0)
    if raw & 4:
        for index in range(0, width, LANES):
            simd.write_4(low, at + index // 2, levels, index, begin)
        at, begin = at + width // 2, np.uint8(4)
    if raw & 2:
        for index in range(0, width, LANES):
            simd.write_2(low, at + index // 4, levels, index, begin)
        at, begin = at + width // 4, np.uint8(begin + 2)
    if raw & 1:
        for index in range(0, width, LANES):
            simd.write_1(low, at + index // 8, levels, index, begin)


@kernel
def _put(pairs, codes, table, body, byte, bits, held):
    """Append a bucket's codes to a stream: by the last table if that of its number would take more bytes.

    Args:
        pairs: uint8, a multiple of 4 of them.
        codes: see ``Tables.encode``.
        table: the number.
        body: uint8, the streams.
        byte: the place of the next byte.
        bits: uint64, the ``held`` bits before it, fewer than 8, of that byte.
        held: uint64.

    Returns:
        byte, bits, held and the table of this bucket.
    """
    most = byte + len(pairs)
    at, word, count = _append(pairs, codes[table], body, byte, bits, held, most)
    if at > most or (at == most and count > held):
        table = len(codes) - 1
        at, word, count = _append(pairs, codes[table], body, byte, bits, held, most)
    return at, word, count, table


@kernel
def _append(pairs, code, body, byte, bits, held, most):
    """Append codes until the place ``most`` is passed."""
    for index in range(0, len(pairs), 4):
        for ahead in range(4):
            entry = code[pairs[index + ahead]]
            bits |= np.uint64(entry >> np.uint32(8)) << held
            held += np.uint64(entry & np.uint32(255))
        simd_pairs.store_word(body, byte, bits)
        byte += np.int64(held >> _THREE)
        bits >>= held & np.uint64(56)
        held &= _SEVEN
        if byte > most:
            break
    return byte, bits, held


@kernel
def decode(
    messages, norms, low, body, steps, lengths, width, padded, raw, codes, out, accumulate
):  # fmt: skip
    """Sum the decoded buckets of several messages, in order; return False if one is damaged.

    Args:
        messages: uint8 ``[messages, bytes]``.
        norms: bytes of the norms, where the tables begin.
        low: where the lowest bits begin.
        body: where the streams begin.
        steps: float32 ``[messages, buckets]``.
        lengths: int32 ``[messages, STREAMS]``.
        width: elements of a bucket.
        padded: see ``encode``.
        raw: see ``encode``.
        codes: see ``Tables.decode``.
        out: a place, see ``source_numba.py``; the last bucket may be shorter.
        accumulate: add to ``out`` instead of overwriting it.
    """
    count, whole = steps.shape[1], True
    pairs, tile = np.empty((_STREAMS, padded // 2), np.uint8), np.empty(padded, np.float32)
    room = np.empty(width, np.float32)
    for bucket in range(0 if len(messages) or accumulate else count):
        first, last = bucket * width, min((bucket + 1) * width, out[3])
        part = begin_write(out, first, last, room, False)
        part[:] = 0
        end_write(out, first, last, part)
    for number in range(len(messages)):
        message = messages[number]
        chosen, streams = message[norms : norms + count], message[body:]
        ends = np.zeros(_STREAMS + 1, np.int64)
        for stream in range(_STREAMS):
            whole &= lengths[number, stream] >= 0
            ends[stream + 1] = ends[stream] + lengths[number, stream]
        if not whole or ends[_STREAMS] > len(streams) - 8 or chosen.max() >= len(codes):
            return False
        at = (8 * ends[:_STREAMS]).astype(np.uint64)
        for row in range((count + _STREAMS - 1) // _STREAMS):
            if row < (count - 1) // _STREAMS:  # the last bucket may be shorter
                _take(streams, at, codes, chosen, row, pairs)
            for stream in range(_STREAMS):
                bucket = count * stream // _STREAMS + row
                if bucket >= count * (stream + 1) // _STREAMS:
                    continue
                first, last = bucket * width, min((bucket + 1) * width, out[3])
                some = padded if last - first == width else (last - first + _ROW - 1) // _ROW * _ROW
                if row >= (count - 1) // _STREAMS:
                    own = pairs[stream, : some // 2]
                    at[stream] = _take_one(streams, at[stream], codes[chosen[bucket]], own)
                add = accumulate or number > 0
                part, full = begin_write(out, first, last, room, add), tile[:some]
                step, place = steps[number, bucket], low + bucket * (padded // 8 * raw)
                _add(part, pairs[stream], message, place, raw, step, full, add)
                end_write(out, first, last, part)
        for stream in range(_STREAMS):
            whole &= np.int64((at[stream] + _SEVEN) >> _THREE) == ends[stream + 1]
    return whole


@kernel
def _add(part, pairs, message, place, raw, step, tile, accumulate):
    """Add a bucket to its elements, or write it there, in ``tile`` if that is longer."""
    target = part if len(part) == len(tile) else tile
    if not accumulate or len(part) < len(tile):
        target[:] = 0
    if accumulate and len(part) < len(tile):
        tile[: len(part)] = part
    _add_rows(target, pairs, message, place, raw, step)
    if len(part) < len(tile):
        part[:] = tile[: len(part)]


@kernel
def _add_rows(tile, pairs, message, four, raw, step):
    two = four + (len(tile) // 2 if raw & 4 else 0)
    one = two + (len(tile) // 4 if raw & 2 else 0)
    if raw == 0:
        for at in range(0, len(tile), LANES):
            simd_pairs.add_4(tile, at, pairs, at // 2, message, four, two, one, step)
    elif raw == 1:
        for at in range(0, len(tile), LANES):
            simd_pairs.add_5(tile, at, pairs, at // 2, message, four, two, one + at // 8, step)
    elif raw == 2:
        for at in range(0, len(tile), LANES):
            simd_pairs.add_6(tile, at, pairs, at // 2, message, four, two + at // 4, one, step)
    elif raw == 3:
        for at in range(0, len(tile), LANES):
            simd_pairs.add_7(tile, at, pairs, at // 2, message, four, two + at // 4, one + at // 8, step)
    else:
        for at in range(0, len(tile), LANES):
            simd_pairs.add_8(tile, at, pairs, at // 2, message, four + at // 2, two, one, step)


@kernel
def _take(streams, at, codes, chosen, row, pairs):
    """Decode one bucket of each stream. Places are in bits; behind the end, the last 8 bytes are read again."""
    count, last = len(chosen), len(streams) - 8
    p0, p1, p2, p3 = at[0], at[1], at[2], at[3]
    c0, c1 = codes[chosen[row]], codes[chosen[count // 4 + row]]
    c2, c3 = codes[chosen[count * 2 // 4 + row]], codes[chosen[count * 3 // 4 + row]]
    for index in range(0, pairs.shape[1], 4):
        w0 = simd_pairs.load_word(streams, min(np.int64(p0 >> _THREE), last)) >> (p0 & _SEVEN)
        w1 = simd_pairs.load_word(streams, min(np.int64(p1 >> _THREE), last)) >> (p1 & _SEVEN)
        w2 = simd_pairs.load_word(streams, min(np.int64(p2 >> _THREE), last)) >> (p2 & _SEVEN)
        w3 = simd_pairs.load_word(streams, min(np.int64(p3 >> _THREE), last)) >> (p3 & _SEVEN)
        for ahead in range(4):
            e0, e1 = np.uint64(c0[w0 & _MASK]), np.uint64(c1[w1 & _MASK])
            e2, e3 = np.uint64(c2[w2 & _MASK]), np.uint64(c3[w3 & _MASK])
            w0, p0 = w0 >> (e0 & _LENGTH), p0 + (e0 & _LENGTH)
            w1, p1 = w1 >> (e1 & _LENGTH), p1 + (e1 & _LENGTH)
            w2, p2 = w2 >> (e2 & _LENGTH), p2 + (e2 & _LENGTH)
            w3, p3 = w3 >> (e3 & _LENGTH), p3 + (e3 & _LENGTH)
            pairs[0, index + ahead], pairs[1, index + ahead] = np.uint8(e0 >> _FOUR), np.uint8(e1 >> _FOUR)
            pairs[2, index + ahead], pairs[3, index + ahead] = np.uint8(e2 >> _FOUR), np.uint8(e3 >> _FOUR)
    at[0], at[1], at[2], at[3] = p0, p1, p2, p3


@kernel
def _take_one(streams, at, code, pairs):
    """Decode a bucket of one stream; see ``_take``."""
    last = len(streams) - 8
    for index in range(0, len(pairs), 4):
        word = simd_pairs.load_word(streams, min(np.int64(at >> _THREE), last)) >> (at & _SEVEN)
        for ahead in range(4):
            entry = np.uint64(code[word & _MASK])
            word, at = word >> (entry & _LENGTH), at + (entry & _LENGTH)
            pairs[index + ahead] = np.uint8(entry >> _FOUR)
    return at
