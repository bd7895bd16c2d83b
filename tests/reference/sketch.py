"""A count-sketch element by element, and sketched SGD's step over several ranks."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
MASK = 2**64 - 1


def words(key: int, count: int) -> list[int]:
    """A key's stream of 64-bit words: splitmix64 in Python's integers."""

    def output(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        return state ^ state >> 31

    start = output((key + 0x9E3779B97F4A7C15) & MASK)
    return [output((start + i * 0x9E3779B97F4A7C15) & MASK) for i in range(count)]


class Hashes:
    """Bucket and sign of every element in every row."""

    def __init__(self, numel: int, rows: int, columns: int, key: int) -> None:
        self.rows, self.columns = rows, columns
        self._words = words(key, rows * math.ceil(numel / columns))

    def __call__(self, row: int, place: int) -> tuple[int, int]:
        word = self._words[place // self.columns * self.rows + row]
        return (place % self.columns + word % 2**62) % self.columns, -1 if word >> 63 else 1


def table(vector: Array, hashes: Hashes) -> Array:
    """Every element into its bucket of each row."""
    sums = np.zeros((hashes.rows, hashes.columns))
    for row in range(hashes.rows):
        for place, value in enumerate(vector):
            bucket, sign = hashes(row, place)
            sums[row, bucket] += sign * value
    return sums


def estimates(sums: Array, numel: int, hashes: Hashes) -> Array:
    """The median of each element's buckets, signs taken off."""
    found = []
    for place in range(numel):
        places = [hashes(row, place) for row in range(hashes.rows)]
        found.append(median(sign * sums[row, bucket] for row, (bucket, sign) in enumerate(places)))
    return np.array(found)


def largest(values: Array, count: int) -> list[int]:
    """Places of the largest magnitudes, in order; the first ones among equals."""
    return sorted(sorted(range(len(values)), key=lambda place: -abs(values[place]))[:count])


def step(vectors: list[Array], k: int, fetched: int, hashes: Hashes) -> tuple[Array, list[Array]]:
    """The mean as it is applied, and what each rank keeps."""
    numel = len(vectors[0])
    found = estimates(sum(table(vector, hashes) for vector in vectors), numel, hashes)
    candidates = largest(found, fetched)
    exact = np.array([sum(vector[place] for vector in vectors) for place in candidates])
    mean, residuals = np.zeros(numel), [vector.copy() for vector in vectors]
    for chosen in largest(exact, k):
        mean[candidates[chosen]] = exact[chosen] / len(vectors)
        for residual in residuals:
            residual[candidates[chosen]] = 0.0
    return mean, residuals
