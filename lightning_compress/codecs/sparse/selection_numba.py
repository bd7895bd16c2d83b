"""The elements whose magnitude reaches a threshold; see ``selection.py``."""

from __future__ import annotations

from lightning_compress.kernels.numba import kernel, simd
from lightning_compress.kernels.numba.words import lowest, without_lowest


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
