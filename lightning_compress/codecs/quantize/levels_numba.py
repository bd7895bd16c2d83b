"""CPU kernels of ``levels.py``. Bit-identical to its tensor operations."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel, simd

_FINEST = np.float32(2.0**-111)
_LARGEST = np.finfo(np.float32).max


@kernel
def fit(largest, top, limit):
    """Return the norm to send and the factor of a block; see ``levels.fit``."""
    norm = min(largest, _LARGEST)
    if norm < _FINEST * top or norm > limit:
        return np.float32(0), np.float32(0)
    exact = 65536.0 * top / np.float64(norm)
    factor = np.float32(exact)
    if np.float64(factor) > exact:
        factor = np.nextafter(factor, np.float32(0))
    return norm, factor


@kernel
def step(norm, top):
    """Return the distance between two numbers; see ``Quantiser.steps``."""
    return min(norm / np.float32(top), np.float32(_LARGEST / top * (1 - 2.0**-22)))


@kernel
def row_of(places, first):
    """Return the first bytes of a row in the planes of 4 or 8, 2 and 1 bits; see ``pack``."""
    wide = places[1] + (first if places[0] == 8 else first // 2)
    return wide, places[2] + first // 4, places[3] + first // 8


@kernel
def pack(levels, body, places, first):
    """Write levels as two's complements to the planes of a message.

    Args:
        levels: float32 ``[n]``, n a multiple of ``simd.LANES``.
        body: uint8, the message's planes.
        places: int64 ``[4]``: the bits of a code, and the first byte of the planes of 4 or 8, 2 and 1 bits.
        first: position of the first level among the codes; a multiple of 8.
    """
    bits = places[0]
    for at in range(0, len(levels), simd.LANES):
        wide, two, one = row_of(places, first + at)
        if bits == 8:
            simd.write_8(body, wide, levels, at, np.uint8(0))
            continue
        if bits & 4:
            simd.write_4(body, wide, levels, at, np.uint8(0))
        if bits & 2:
            simd.write_2(body, two, levels, at, np.uint8(bits & 4))
        if bits & 1:
            simd.write_1(body, one, levels, at, np.uint8(bits & 6))


@kernel
def add_row(tile, at, body, places, first, steps, column, shift, sign):
    """Add the numbers of a row of codes to a tile; see ``pack`` and ``simd.add_2``."""
    wide, two, one = row_of(places, first)
    bits = places[0]
    if bits == 4:
        simd.add_4(tile, at, body, wide, two, one, steps, column, shift, sign)
    elif bits == 5:
        simd.add_5(tile, at, body, wide, two, one, steps, column, shift, sign)
    elif bits == 6:
        simd.add_6(tile, at, body, wide, two, one, steps, column, shift, sign)
    elif bits == 3:
        simd.add_3(tile, at, body, wide, two, one, steps, column, shift, sign)
    elif bits == 2:
        simd.add_2(tile, at, body, wide, two, one, steps, column, shift, sign)
    elif bits == 7:
        simd.add_7(tile, at, body, wide, two, one, steps, column, shift, sign)
    else:
        simd.add_8(tile, at, body, wide, two, one, steps, column, shift, sign)


@kernel
def pack_one(code, body, places, index):
    """Write one code, after all those before it in its bytes; see ``pack``."""
    low = 0
    for place, width in ((1, places[0] & 12), (2, places[0] & 2), (3, places[0] & 1)):
        if width:
            byte, shift = places[place] + index * width // 8, index * width % 8
            body[byte] = (body[byte] if shift else 0) | ((code >> low) & ((1 << width) - 1)) << shift
            low += width


@kernel
def unpack_one(body, places, index):
    """Return one code; see ``pack``."""
    code, low = 0, 0
    for place, width in ((1, places[0] & 12), (2, places[0] & 2), (3, places[0] & 1)):
        if width:
            bits = body[places[place] + index * width // 8] >> (index * width % 8) & ((1 << width) - 1)
            code |= bits << low
            low += width
    return code


@kernel
def subtract(vector, levels, step):
    """Leave in ``vector`` what its levels do not send."""
    for index in range(len(vector)):
        vector[index] -= levels[index] * step
