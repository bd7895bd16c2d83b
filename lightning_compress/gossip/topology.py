"""Who averages with whom, and by what weights: mixing matrices, checked."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

TOLERANCE = 1e-9
"""By which rows may differ from a sum of 1, and a matrix from its transpose."""


@dataclass(frozen=True, eq=False)
class Topology:
    """Mixing matrices of ``size`` ranks, used in turn.

    Args:
        name: what it is called in messages.
        matrices: float64 ``[size, size]`` each, symmetric, non-negative, rows that sum to 1; one, or several that are
            used one after the other, round by round. Together they connect all ranks.

    Raises:
        ValueError: a matrix is none of that, or ranks are not connected.
    """

    name: str
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        if not self.matrices:
            raise ValueError(f"topology {self.name}: give at least one matrix")
        for matrix in self.matrices:
            _check(self.name, matrix, self.matrices[0].shape)
        object.__setattr__(self, "matrices", tuple(map(_even, self.matrices)))
        if self.size > 1 and not _connected(sum(self.matrices[1:], self.matrices[0])):
            raise ValueError(f"topology {self.name}: ranks are not connected, and would never agree; add edges")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.matrices[0])

    @property
    def varies(self) -> bool:
        """Whether other neighbours meet in other rounds."""
        return len(self.matrices) > 1

    @cached_property
    def gap(self) -> float:
        """1 less the second largest singular value of a cycle of matrices, per round: 1 agrees at once, 0 never."""
        if self.size == 1:
            return 1.0
        product = np.eye(self.size)
        for matrix in self.matrices:
            product = matrix @ product
        second = float(np.linalg.svd(product - 1 / self.size, compute_uv=False)[0])
        return 1 - max(second, 0.0) ** (1 / len(self.matrices)) if second > TOLERANCE else 1.0

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the matrices."""
        return zlib.crc32(b"".join(each.tobytes() for each in self.matrices))

    @cached_property
    def least(self) -> float:
        """The smallest eigenvalue of any of the matrices; D2 needs more than -1/3."""
        return min(float(np.linalg.eigvalsh(matrix)[0]) for matrix in self.matrices)

    def lazy(self) -> Topology:
        """The same with half of the weight left where it is, ``(W + I) / 2``: all eigenvalues are 0 or more."""
        return Topology(f"lazy {self.name}", tuple((each + np.eye(self.size)) / 2 for each in self.matrices))

    def weights(self, rank: int, number: int) -> dict[int, float]:
        """A rank's neighbours in a round, with their weights, in the order of the ranks."""
        row = self.matrices[number % len(self.matrices)][rank]
        return {peer: float(weight) for peer, weight in enumerate(row) if weight and peer != rank}

    def describe(self) -> str:
        """A line for a log."""
        degrees = {len(self.weights(rank, number)) for rank in range(self.size) for number in range(len(self.matrices))}
        low, high = min(degrees), max(degrees)
        peers = f"{low}" if low == high else f"{low} to {high}"
        return f"{self.name} of {self.size} ranks, {peers} neighbours a round, spectral gap {self.gap:.3g}"


def _check(name: str, matrix: Matrix, shape: tuple[int, ...]) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape != shape or not len(matrix):
        raise ValueError(f"topology {name}: a matrix has shape {matrix.shape}; it must be square, and all of one size")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise ValueError(f"topology {name}: weights must be finite and 0 or more; the least is {matrix.min():g}")
    for what, sums in (("row", matrix.sum(1)), ("column", matrix.sum(0))):
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > TOLERANCE:
            raise ValueError(
                f"topology {name}: {what} {worst} sums to {sums[worst]:.9g}, and must sum to 1 (doubly stochastic), "
                "else the mean of the models would move"
            )
    if np.abs(matrix - matrix.T).max() > TOLERANCE:
        row, column = np.unravel_index(np.abs(matrix - matrix.T).argmax(), matrix.shape)
        raise ValueError(
            f"topology {name}: the weight of {row} and {column} is {matrix[row, column]:g} one way and "
            f"{matrix[column, row]:g} the other; it must be symmetric, since neighbours answer each other"
        )


def _even(matrix: Matrix) -> Matrix:
    """The same in both directions, without edges of almost no weight: an edge that one side sees is a wait for ever."""
    even = (matrix + matrix.T) / 2
    return np.where(even > TOLERANCE, even, 0.0)


def _connected(matrix: Matrix) -> bool:
    reached = np.zeros(len(matrix), bool)
    reached[0] = True
    for _ in range(len(matrix)):
        reached |= (matrix[reached] > 0).any(0)
    return bool(reached.all())


def metropolis(edges: Matrix) -> Matrix:
    """Metropolis-Hastings weights of an undirected graph: ``1 / (1 + larger degree)`` an edge, the rest stays.

    Args:
        edges: ``[size, size]``, symmetric; other than 0 where two ranks are neighbours.
    """
    there = (edges != 0) & ~np.eye(len(edges), dtype=bool)
    degrees = there.sum(1)
    weights = np.where(there, 1 / (1 + np.maximum.outer(degrees, degrees)), 0.0)
    return weights + np.diag(1 - weights.sum(1))


def ring(size: int) -> Topology:
    """Each rank with the next and the one before, by a third each."""
    return _shifted("ring", size, (1,))


def complete(size: int) -> Topology:
    """Each rank with every other: the exact mean in every round."""
    return Topology("complete", (np.full((size, size), 1 / size),))


def star(size: int) -> Topology:
    """Rank 0 with every other: it carries all the traffic."""
    edges = np.zeros((size, size))
    edges[0] = edges[:, 0] = 1
    return Topology("star", (metropolis(edges),))


def exponential(size: int) -> Topology:
    """Each rank with those 1, 2, 4, ... ahead and behind, by equal weights (Ying et al., NeurIPS 2021)."""
    return _shifted("exponential", size, tuple(2**power for power in range(max(1, math.ceil(math.log2(max(size, 2)))))))


def one_peer(size: int) -> Topology:
    """In each round with one other rank, whose number differs in one bit: the exact mean after log2(size) rounds.

    Raises:
        ValueError: size is no power of 2.
    """
    if size & (size - 1):
        raise ValueError(
            f"topology one_peer: {size} ranks; it pairs 2, 4, 8, ... ranks. Use 'exponential', 'ring', or a matrix"
        )
    steps = [1 << bit for bit in range(max(1, (size - 1).bit_length()))] if size > 1 else []
    flips = [np.eye(size)[np.arange(size) ^ step] for step in steps]
    return Topology("one_peer", tuple((np.eye(size) + flip) / 2 for flip in flips) or (np.eye(1),))


def _shifted(name: str, size: int, shifts: Sequence[int]) -> Topology:
    matrix = np.eye(size)
    for shift in {each % size for ahead in shifts for each in (ahead, -ahead)} - {0}:
        matrix += np.eye(size)[(np.arange(size) + shift) % size]
    return Topology(name, (matrix / matrix[0].sum(),))


def from_file(path: str | Path) -> Topology:
    """A matrix from a text file (rows of numbers, by spaces or commas), or one or several ``[n, size, size]`` in .npy.

    Raises:
        ValueError: the file cannot be read, or a matrix is refused.
    """
    place = Path(path)
    try:
        if place.suffix == ".npy":
            given = np.load(place, allow_pickle=False)
        else:
            given = np.loadtxt(place.read_text().replace(",", " ").splitlines(), ndmin=2)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"topology {str(path)!r} cannot be read as a matrix: {error}") from error
    return from_matrices(given, place.name)


def from_matrices(given: object, name: str = "matrix") -> Topology:
    """A matrix, or several that are used in turn, as nested lists or arrays.

    Raises:
        ValueError: see ``Topology``.
    """
    try:
        array = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"topology {name}: the weights are no numbers: {error}") from error
    if array.ndim not in (2, 3):
        raise ValueError(f"topology {name}: a matrix has two dimensions, this has shape {array.shape}")
    return Topology(name, tuple(array if array.ndim == 3 else array[None]))


TOPOLOGIES: Mapping[str, Callable[[int], Topology]] = {
    "ring": ring,
    "complete": complete,
    "star": star,
    "exponential": exponential,
    "one_peer": one_peer,
}
"""By name."""


def build_topology(given: object, size: int) -> Topology:
    """A topology as users give it.

    Args:
        given: a name, the path of a file, a matrix, a ``Topology``, or ``{"name": one of these, "lazy": bool}``.
        size: ranks of the run.

    Raises:
        ValueError: there is no such topology, or it is of another number of ranks.
    """
    if isinstance(given, Mapping):
        if not {"name"} <= given.keys() <= {"name", "lazy"} or not isinstance(given.get("lazy", False), bool | None):
            raise ValueError(f"topology={dict(given)!r}: give 'name', and perhaps 'lazy', true or false")
        made = build_topology(given["name"], size)
        return made.lazy() if given.get("lazy") else made
    if isinstance(given, Topology):
        made = given
    elif isinstance(given, str | Path) and str(given) in TOPOLOGIES:
        made = TOPOLOGIES[str(given)](size)
    elif isinstance(given, str | Path):
        if not Path(given).is_file():
            raise ValueError(f"topology={str(given)!r} is no file, and none of {', '.join(TOPOLOGIES)}")
        made = from_file(given)
    else:
        made = from_matrices(given)
    if made.size != size:
        raise ValueError(f"topology {made.name} is of {made.size} ranks, and this run has {size}")
    return made
