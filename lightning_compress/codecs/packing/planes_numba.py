"""Packing of codes into planes by loops, for kernels on a CPU; the same bytes as ``planes.py``.

``planes`` is int64 ``[planes, 3]``, the rows of ``Planes.table``. Codes are uint32. Any number of codes is allowed, in
arrays that begin and end anywhere.
"""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel, simd_codes

LANES = simd_codes.LANES


@kernel
def pack(codes, body, planes, first):
    """Write codes to the planes of a message.

    Args:
        codes: ``[n]``, below ``2^bits``.
        body: uint8, the message's planes.
        planes: see above.
        first: position of the first code among the message's; a multiple of 8. The bytes of these codes are
            overwritten; what the last byte of a plane holds beyond them becomes 0.
    """
    whole = len(codes) // LANES * LANES
    for number in range(len(planes)):
        low, width = np.int32(planes[number, 0]), planes[number, 1]
        _write(codes[:whole], body, planes[number, 2] + first * width // 8, low, width)
    if whole < len(codes):
        row, packed = np.zeros(LANES, np.uint32), np.empty(4 * LANES, np.uint8)
        for index in range(whole, len(codes)):
            row[index - whole] = codes[index]
        for number in range(len(planes)):
            low, width = np.int32(planes[number, 0]), planes[number, 1]
            _write(row, packed, np.int64(0), low, width)  # 0 would be a type of its own
            start = planes[number, 2] + (first + whole) * width // 8
            for byte in range(((len(codes) - whole) * width + 7) // 8):
                body[start + byte] = packed[byte]


@kernel
def _write(codes, body, start, low, width):
    if width == 8:
        for at in range(0, len(codes), LANES):
            simd_codes.write_8(body, start + at, codes, at, low)
    elif width == 4:
        for at in range(0, len(codes), LANES):
            simd_codes.write_4(body, start + at // 2, codes, at, low)
    elif width == 2:
        for at in range(0, len(codes), LANES):
            simd_codes.write_2(body, start + at // 4, codes, at, low)
    elif width == 1:
        for at in range(0, len(codes), LANES):
            simd_codes.write_1(body, start + at // 8, codes, at, low)
    elif width == 16:
        for at in range(0, len(codes), LANES):
            simd_codes.write_16(body, start + 2 * at, codes, at, low)
    else:
        for at in range(0, len(codes), LANES):
            simd_codes.write_32(body, start + 4 * at, codes, at, low)


@kernel
def unpack(codes, body, planes, first):
    """Read codes, which are overwritten; see ``pack``."""
    whole = len(codes) // LANES * LANES
    for number in range(len(planes)):
        low, width, mask = np.int32(planes[number, 0]), planes[number, 1], np.int32(-(number > 0))
        _read(codes[:whole], body, planes[number, 2] + first * width // 8, low, width, mask)
    if whole < len(codes):
        row, packed = np.zeros(LANES, np.uint32), np.zeros(4 * LANES, np.uint8)
        for number in range(len(planes)):
            low, width = np.int32(planes[number, 0]), planes[number, 1]
            start = planes[number, 2] + (first + whole) * width // 8
            for byte in range(((len(codes) - whole) * width + 7) // 8):
                packed[byte] = body[start + byte]
            _read(row, packed, np.int64(0), low, width, np.int32(-1))
        for index in range(whole, len(codes)):
            codes[index] = row[index - whole]


@kernel
def _read(codes, body, start, low, width, mask):
    if width == 8:
        for at in range(0, len(codes), LANES):
            simd_codes.read_8(codes, at, body, start + at, low, mask)
    elif width == 4:
        for at in range(0, len(codes), LANES):
            simd_codes.read_4(codes, at, body, start + at // 2, low, mask)
    elif width == 2:
        for at in range(0, len(codes), LANES):
            simd_codes.read_2(codes, at, body, start + at // 4, low, mask)
    elif width == 1:
        for at in range(0, len(codes), LANES):
            simd_codes.read_1(codes, at, body, start + at // 8, low, mask)
    elif width == 16:
        for at in range(0, len(codes), LANES):
            simd_codes.read_16(codes, at, body, start + 2 * at, low, mask)
    else:
        for at in range(0, len(codes), LANES):
            simd_codes.read_32(codes, at, body, start + 4 * at, low, mask)
