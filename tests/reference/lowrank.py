"""PowerSGD over several ranks, in float64 and one matrix at a time, as the paper's Algorithms 1 and 2 have it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def orthonormal(matrix: Array) -> Array:
    """Gram-Schmidt, twice over each column."""
    columns: list[Array] = []
    for column in matrix.T:
        for _ in range(2):
            for other in columns:
                column = column - (other @ column) * other
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, axis=1)


def powersgd(matrices: list[Array], q: Array) -> tuple[Array, Array, list[Array]]:
    """One step on one matrix.

    Args:
        matrices: each rank's gradient plus residual, ``[n, m]``.
        q: the last step's factor, ``[m, r]``.

    Returns:
        the mean as it is approximated, the new factor, and each rank's residual.
    """
    p = orthonormal(sum(matrix @ q for matrix in matrices) / len(matrices))
    factors = [matrix.T @ p for matrix in matrices]
    q = sum(factors) / len(matrices)
    residuals = [matrix - p @ factor.T for matrix, factor in zip(matrices, factors, strict=True)]
    return p @ q.T, q, residuals


def atomo_probabilities(values: list[float], s: int) -> list[float]:
    """The paper's Algorithm 1: the largest gets its share; if that is more than 1, it gets 1, and the next is first.

    Args:
        values: magnitudes of the atoms, descending.
        s: how many are to be kept on average.
    """
    if not values or s == 0 or not any(values):
        return [0.0] * len(values)
    if values[0] * s <= sum(values):
        return [value * s / sum(values) for value in values]
    return [1.0, *atomo_probabilities(values[1:], s - 1)]


def atomo(matrix: Array, s: int, u: float) -> Array:
    """What is sent of a matrix: the atoms in whose stretch of the probabilities a ``u + integer`` is."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    sent, start = np.zeros_like(matrix), 0.0
    for i, probability in enumerate(atomo_probabilities(list(values), s)):
        certain = probability >= 1
        if certain or any(start <= u + whole < start + probability for whole in range(s)):
            sent += values[i] / probability * np.outer(left[:, i], right[i])
        start += 0.0 if certain else probability
    return sent
