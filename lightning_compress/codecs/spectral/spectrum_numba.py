"""CPU kernels of ``spectrum.py``, around the transforms. Bit-identical to its tensor operations."""

from __future__ import annotations

import numpy as np

from lightning_compress.codecs.packing.planes_numba import pack, unpack
from lightning_compress.codecs.quantize.minifloat_numba import (
    REST,
    ROUNDED,
    decode,
    encode,
    ends,
    fit,
    negated,
    squares,
)
from lightning_compress.codecs.spectral.bins_numba import choose, expand, read_places
from lightning_compress.core.source_numba import begin_write, borrow, end_write, largest, load
from lightning_compress.kernels.numba import copy, kernel, spectra

MARGIN = 2 * spectra.MANY
"""Numbers beyond a spectrum's end that are read, but not used."""
_POWERS = (np.arange(255, dtype=np.int32) << 23).view(np.float32)
_FIRST = 1 << 14
"""Higher half of the energy that is tried first as a threshold."""
_MAGNITUDE = np.int32(0x7FFFFFFF)


@kernel
def load_rows(source, first, rest, length, limit, floats, scales):
    """Copy blocks to the rows of a transform's input, divided by a power of two, and fill them up with zeros.

    Args:
        source: see ``source_numba.py``.
        first: the first block's first element.
        rest: float32, as long as the source, overwritten by these elements; or empty.
        length: elements of a block.
        limit: exponent of the largest scale. Larger numbers saturate.
        floats: float32 ``[rows, padded length]``, overwritten.
        scales: float32 ``[rows]``, overwritten by the powers of two.

    Returns:
        The largest magnitude in the source's memory; see ``source_numba.largest``.
    """
    _, addend, coded = source
    most, room = np.int32(0), np.empty(0 if len(rest) else length, np.float32)
    for row in range(len(floats)):
        start = first + row * length
        if len(rest):
            part = rest[start : start + length]
            found = load(source, start, start + length, part)
        else:
            part, found = borrow(source, start, start + length, room)
        most = max(most, found)
        if len(addend) or len(coded):
            found = largest(part)
        exponent = _exponent(found, limit)
        scales[row] = _POWERS[127 + exponent]
        inverse, out = _POWERS[127 - exponent], floats[row]
        if exponent == limit:
            for index in range(length):
                out[index] = min(max(part[index] * inverse, np.float32(-1)), np.float32(1))
        else:
            for index in range(length):
                out[index] = part[index] * inverse
        out[length:] = 0
    return most


@kernel
def _exponent(pattern, limit):
    """Return the exponent of the power of two above a magnitude, given by its bits: -125 to ``limit``; 0 for zero."""
    return min(max((pattern >> 23) - 126, -125), limit) if pattern else 0


@kernel
def _energies(spectrum, first, bins, width, energies, coarse):
    """Write the bits of squared magnitudes, int32, and their higher halves, int16; -1 beyond the last one."""
    if width == 2:
        for index in range(0, bins, 2 * spectra.LANES):
            spectra.energies(energies, index, coarse, index, spectrum, first + 2 * index)
    else:
        squares = energies.view(np.float32)
        for index in range(bins):
            squares[index] = spectrum[first + index] * spectrum[first + index]
        for index in range(bins):
            energies[index] &= _MAGNITUDE
            coarse[index] = energies[index] >> 16
    energies[bins:] = -1
    coarse[bins:] = -1


@kernel
def best_mantissa(spectrum, rows, shape, bits, tried, codes, work):
    """Return the bits of mantissa with the least squared error on the coefficients that are sent of some blocks.

    Args:
        spectrum: see ``encode_rows``.
        rows: number of blocks.
        shape: see ``encode_rows``.
        bits: bits of a code, less than 32.
        tried: number of mantissas, from 0 on.
        codes: see ``encode_rows``.
        work: see ``encode_rows``.
    """
    values, errors, guess = work[4], np.zeros(tried), _FIRST
    left = np.empty_like(values)
    values[shape[1] * shape[2] :] = 0
    for row in range(rows):
        guess = _select(spectrum, row, shape, guess, work)
        _take(spectrum, row, shape, work[3], values)
        upper, lower = ends(values)
        for mantissa in range(tried):
            copy(values, left)
            encode(left, codes[: len(left)], fit(bits, mantissa, upper, lower, True), REST)
            errors[mantissa] += squares(left)
    return np.argmin(errors) if errors.any() else max(0, bits - 4)


@kernel
def _select(spectrum, row, shape, guess, work):
    """Mark the largest coefficients of a row in ``words``, and write their positions to ``places``."""
    bins, width, keep, _, _ = shape
    energies, coarse, words, places, _ = work
    if keep < bins:
        _energies(spectrum, row * bins * width, bins, width, energies, coarse)
        guess = choose(energies, coarse, bins, keep, guess, words)
        expand(words.view(np.uint32), places)
    else:
        for index in range(keep):
            places[index] = index
    return guess


@kernel
def _take(spectrum, row, shape, places, values):
    """Copy a row's coefficients at these places."""
    bins, width, keep, _, _ = shape
    given = spectrum[row * bins * width : (row + 1) * bins * width]
    if width == 2:
        source, out = given.view(np.int64), values.view(np.int64)
        for index in range(keep):
            out[index] = source[places[index]]
    else:
        for index in range(keep):
            values[index] = given[places[index]]


@kernel
def encode_rows(spectrum, scales, block, shape, coding, ranges, where, codes, body, planes, work):
    """Encode the largest coefficients of blocks, and leave in the spectrum what is decoded of them.

    Args:
        spectrum: float32, of each row its coefficients; and ``MARGIN`` numbers more.
        scales: float32 ``[rows]``; see ``load_rows``.
        block: number of the first block; a multiple of 8.
        shape: coefficients of a row, float32 numbers of each, how many are sent, bytes of a row's positions, and
            whether these are a list.
        coding: bits of a code, and of its mantissa.
        ranges: float32 ``[3, blocks]``; the columns of these blocks are overwritten.
        where: uint8, the positions of all blocks; those of these blocks are overwritten.
        codes: scratch memory for the codes of all rows, and ``LANES`` more.
        body: uint8, the planes of all codes; those of these blocks are overwritten.
        planes: see ``planes_numba.py``.
        work: scratch memory: int32 and int16, coefficients of a row rounded up to a multiple of 64; uint64, a bit for
            each; uint32, 8 more than there are; float32, the sent numbers of a row rounded up to ``LANES``.
    """
    _, width, keep, size, listed = shape
    _, _, words, places, values = work
    count, guess = keep * width, _FIRST
    bits = ranges.view(np.int32)
    values[count:] = 0
    for row in range(len(scales)):
        guess = _select(spectrum, row, shape, guess, work)
        packed = where[(block + row) * size : (block + row + 1) * size]
        if listed:
            copy(places[:keep], packed.view(np.uint16))
        elif size:
            copy(words.view(np.uint8)[:size], packed)
        _take(spectrum, row, shape, places, values)
        upper, lower = ends(values)
        ranges[0, block + row], bits[1, block + row], bits[2, block + row] = scales[row], negated(lower), upper
        form = fit(coding[0], coding[1], upper, lower, True)
        encode(values, codes[row * count : row * count + len(values)], form, ROUNDED)
        for index in range(len(values)):
            values[index] = values[index] * scales[row] + np.float32(0)  # no -0.0
        _place(spectrum, row, shape, places, values)
    pack(codes[: len(scales) * count], body, planes, block * count)


@kernel
def _place(spectrum, row, shape, places, values):
    """Set a row's coefficients at these places, and all others to 0."""
    bins, width, keep, _, _ = shape
    given = spectrum[row * bins * width : (row + 1) * bins * width]
    given[:] = 0
    if width == 2:
        source, out = values.view(np.int64), given.view(np.int64)
        for index in range(keep):
            out[places[index]] = source[index]
    else:
        for index in range(keep):
            given[places[index]] = values[index]


@kernel
def _add(spectrum, row, shape, places, values):
    """Add to a row's coefficients at these places."""
    bins, width, keep, _, _ = shape
    given = spectrum[row * bins * width : (row + 1) * bins * width]
    if width == 2:
        for index in range(keep):
            spectra.add_pair(given, 2 * places[index], values, 2 * index)
    else:
        for index in range(keep):
            given[places[index]] += values[index]


@kernel
def subtract_rows(rest, first, floats, length):
    """Subtract the rows of an inverse transform's output from the blocks that begin at element ``first``."""
    for row in range(len(floats)):
        part, given = rest[first + row * length : first + (row + 1) * length], floats[row]
        for index in range(length):
            part[index] -= given[index]


@kernel
def write_rows(place, first, floats, length, accumulate):
    """Write the rows of an inverse transform's output, or add them, to a place; see ``subtract_rows``."""
    room = np.empty(length, np.float32)
    for row in range(len(floats)):
        start, given = first + row * length, floats[row]
        part = begin_write(place, start, start + length, room, accumulate)
        if accumulate:
            for index in range(length):
                part[index] += given[index]
        else:
            copy(given[:length], part)
        end_write(place, start, start + length, part)


@kernel
def add_rows(spectrum, rows, fresh, block, shape, coding, bounds, ranges, where, codes, body, planes, work):
    """Add what a message holds of some blocks to their spectra; see ``encode_rows``.

    ``fresh``: overwrite the spectra. ``bounds``: factor of the message, the largest scale, and the largest number of a
    spectrum, float32.

    Returns:
        False if the positions are damaged; then the spectra are undefined.
    """
    _, width, keep, size, _ = shape
    _, _, words, places, values = work
    count = keep * width
    unpack(codes[: rows * count], body, planes, block * count)
    pattern = np.empty(2, np.float32)
    patterns = pattern.view(np.int32)
    for row in range(rows):
        if not read_places(where[(block + row) * size : (block + row + 1) * size], shape, words, places):
            return False
        scale = min(max(_number(ranges[0, block + row]), np.float32(0)), bounds[1]) * bounds[0]
        pattern[0] = min(max(_number(ranges[2, block + row]), -bounds[2]), bounds[2])
        pattern[1] = -min(max(_number(ranges[1, block + row]), -bounds[2]), bounds[2])
        form = fit(coding[0], coding[1], patterns[0], patterns[1], True)
        values[:] = 0
        decode(codes[row * count : row * count + len(values)], values, form, scale)
        if fresh:
            _place(spectrum, row, shape, places, values)
        else:
            _add(spectrum, row, shape, places, values)
    return True


@kernel
def _number(value):
    """Return a float32, or 0 for NaN."""
    return value if value == value else np.float32(0)
