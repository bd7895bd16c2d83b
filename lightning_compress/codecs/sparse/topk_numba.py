"""Elements that reach a threshold, and lists of indices and values, added up; see ``selection.py``, ``topk.py``."""

from __future__ import annotations

from lightning_compress.kernels.numba import kernel, simd
from lightning_compress.kernels.numba.words import lowest, without_lowest

_TILE = 4096
"""Elements that stay in the nearest cache while all lists are added."""


@kernel
def add(indices, values, slots, first, weight, out, cursors):
    """Write ``weight`` times the sum of lists, in the order of the lists.

    Args:
        indices: int32 ``[lists, k]``.
        values: float32 ``[lists, k]``.
        slots: which columns to add: ascending in index; then 0, where the value is 0, too.
        first: what the index of the first element is.
        weight: float32.
        out: float32 ``[n]``.
        cursors: int64 ``[lists]``; scratch.

    Returns:
        whether the lists are in order and inside; if not, what was written has no meaning.
    """
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
    """Append the indices of ``source[first:last]`` whose magnitude reaches ``least``, and the magnitudes.

    Args:
        source: float32 ``[n]``.
        least: float32, above 0.
        first: where to begin.
        last: where to end.
        candidates: int32, with room for ``count + last - first``.
        magnitudes: float32, as long.
        count: how many there are.

    Returns:
        how many there are then.
    """
    index = first
    while index + 32 <= last:
        word = simd.reaching(source, index, least)
        while word:
            found = index + lowest(word)
            candidates[count] = found
            magnitudes[count] = abs(source[found])
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
