"""Reading and writing of vectors that lie in several pieces of a CPU's memory; see ``source.py``.

A place is a tuple: float32 numbers in memory, the rows of ``blocks.table`` in the vector's order, the vector's element
with which a part begins, and the part's elements. A source is a place, an addend of the part, float32, and the codes of
errors that are added too, uint8; both are empty if there are none.
"""

from __future__ import annotations

import numpy as np

from lightning_compress.core.blocks import AVERAGE
from lightning_compress.core.blocks_numba import add_to
from lightning_compress.kernels.numba import kernel

_AVERAGE = AVERAGE
_NOTHING = np.empty(0, np.uint8)
_TILE = 4096
"""Elements that are copied at a time; a multiple of ``blocks.BLOCK``."""


@kernel
def _row_of(rows, index):
    """Return the last row that begins at an element of the vector or before it."""
    low, high = 0, len(rows)
    while high - low > 1:
        middle = (low + high) // 2
        if rows[middle, 1] <= index:
            low = middle
        else:
            high = middle
    return low


@kernel
def together(place, first, last):
    """Return where the elements ``first`` to ``last`` of a part begin in memory if they lie in one piece; else -1."""
    _, rows, begin, _ = place
    row = _row_of(rows, begin + first)
    start, count = rows[row, 1], rows[row, 2]
    return rows[row, 0] + begin + first - start if begin + last <= start + count else -1


@kernel
def part_of_place(place, start, numel):
    """Return the place of a part."""
    numbers, rows, begin, _ = place
    return numbers, rows, begin + start, numel


@kernel
def part_of(source, start, numel):
    """Return a part of a source."""
    place, addend, coded = source
    return part_of_place(place, start, numel), addend[start : start + numel], coded


@kernel
def load(source, first, last, out):
    """Copy the elements ``first`` to ``last`` of a source to ``out``, which may be where they lie.

    Returns:
        ``largest`` of what lies in memory.
    """
    (numbers, rows, begin, _), addend, coded = source
    most, index = np.int32(0), begin + first
    row = _row_of(rows, index)
    while index < begin + last:
        start, count, code = rows[row, 1], rows[row, 2], rows[row, 3]
        end, at = min(start + count, begin + last, index + _TILE), index - start
        given = numbers[rows[row, 0] + at : rows[row, 0] + end - start]
        part = out[index - begin - first : end - begin - first]
        if len(addend):
            found = _add(given, addend[index - begin : end - begin], part)
        elif len(coded) and rows[row, 5] == _AVERAGE and code >= 0:
            found = largest(given)
            add_to(coded[code + at : code + end - start].view(np.int8), coded[code + count :], at, given, part)
        elif given.ctypes.data == part.ctypes.data:
            found = largest(given)
        else:
            found = _copy(given, part)
        most = max(most, found)
        index, row = end, row + (end == start + count)
    return most


@kernel
def _add(given, addend, out):
    most, bits = np.int32(0), given.view(np.int32)
    for index in range(len(given)):
        out[index] = given[index] + addend[index]
        most = max(most, bits[index] & np.int32(0x7FFFFFFF))
    return most


@kernel
def _copy(given, out):
    most, bits = np.int32(0), given.view(np.int32)
    for index in range(len(given)):
        out[index] = given[index]
        most = max(most, bits[index] & np.int32(0x7FFFFFFF))
    return most


@kernel
def largest(numbers):
    """Return the largest magnitude, as the bits of a float32: as integers, NaN and infinity are above all others."""
    most, bits = np.int32(0), numbers.view(np.int32)
    for index in range(len(bits)):
        most = max(most, bits[index] & np.int32(0x7FFFFFFF))
    return most


@kernel
def borrow(source, first, last, room):
    """Return the elements ``first`` to ``last``, not to be changed: in ``room`` if they do not lie in one piece."""
    place, addend, coded = source
    at = together(place, first, last)
    if at >= 0 and not len(addend) and not len(coded):
        part = place[0][at : at + last - first]
        return part, largest(part)
    part = room[: last - first]
    return part, load(source, first, last, part)


@kernel
def begin_write(place, first, last, room, accumulate):
    """Return where to write the elements ``first`` to ``last``: ``room`` if they do not lie in one piece.

    With ``accumulate``, it holds what is there already. Call ``end_write`` afterwards.
    """
    at = together(place, first, last)
    if at >= 0:
        return place[0][at : at + last - first]
    part = room[: last - first]
    if accumulate:
        load((place, room[:0], _NOTHING), first, last, part)
    return part


@kernel
def end_write(place, first, last, part):
    """Copy to its place what ``begin_write`` returned room for."""
    if together(place, first, last) < 0:
        store(place, first, part)


@kernel
def store(place, first, values):
    """Write the elements from ``first`` on."""
    numbers, rows, begin, _ = place
    index, last = begin + first, begin + first + len(values)
    row = _row_of(rows, index)
    while index < last:
        start, end = rows[row, 1], min(rows[row, 1] + rows[row, 2], last)
        at = rows[row, 0] + index - start
        _copy(values[index - begin - first : end - begin - first], numbers[at : at + end - index])
        index, row = end, row + 1
