"""CPU kernels of ``topk.py`` and ``selection.py``. Bit-identical to their tensor operations."""

from __future__ import annotations

from lightning_compress.core.source_numba import together
from lightning_compress.kernels.numba import kernel, simd
from lightning_compress.kernels.numba.words import lowest, without_lowest

_TILE = 4096
"""Elements per loop, which stay in the nearest cache while all lists are added."""


@kernel
def add(indices, values, parts, weight, place, cursors):
    """Write ``weight`` times the sum of sparse lists, added in the order of the lists.

    Args:
        indices: int32 ``[lists, k]``.
        values: float32 ``[lists, k]``.
        parts: int64 ``[parts, 4]``: of each part of the vector, which lies in one piece, its first element, one past
            its last, its first column of the lists, and one past its last. Indices of a part ascend; empty slots, index
            0 and value 0, may follow.
        weight: float32.
        place: of the vector; see ``core/source_numba.py``.
        cursors: int64 ``[lists]``; scratch.

    Returns:
        False if indices do not ascend or are out of range. Then the content of the vector is undefined.
    """
    for number in range(len(parts)):
        first, last = parts[number, 0], parts[number, 1]
        at = together(place, first, last)
        slots = parts[number, 2], parts[number, 3]
        if not _add_part(indices, values, slots, first, weight, place[0][at : at + last - first], cursors):
            return False
    return True


@kernel
def _add_part(indices, values, slots, first, weight, out, cursors):
    start, stop = slots
    cursors[:] = start
    for begin in range(0, len(out), _TILE):
        end = min(begin + _TILE, len(out))
        out[begin:end] = 0
        for row in range(len(indices)):
            cursor, least = cursors[row], first + begin
            while cursor < stop:
                index = indices[row, cursor]
                if index >= first + end:
                    break
                if index >= least:
                    out[index - first] += values[row, cursor] * weight
                    least = index
                elif index != 0 or values[row, cursor] != 0:
                    return False
                cursor += 1
            cursors[row] = cursor
    return cursors.sum() == cursors.size * stop


@kernel
def collect(source, least, first, last, candidates, magnitudes, count):
    """Append the indices and magnitudes of the elements of ``source[first:last]`` whose magnitude reaches ``least``.

    Args:
        source: float32 ``[n]``.
        least: threshold, float32, above 0.
        first: first index.
        last: end index.
        candidates: int32, at least ``count + last - first`` elements.
        magnitudes: float32, of the same length.
        count: number of candidates so far.

    Returns:
        The new number of candidates.
    """
    index = first
    while index + 32 <= last:
        word = simd.reaching(source, index, least)
        while word:
            hit = index + lowest(word)
            candidates[count] = hit
            magnitudes[count] = abs(source[hit])
            count += 1
            word = without_lowest(word)
        index += 32
    while index < last:
        if abs(source[index]) >= least:
            candidates[count] = index
            magnitudes[count] = abs(source[index])
            count += 1
        index += 1
    return count
