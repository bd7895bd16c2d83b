"""Topologies of gossip: which ranks are neighbours, and the weights of their averages, as mixing matrices."""

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
"""Allowed deviation of a row's sum from 1, and of a matrix from its transpose."""


@dataclass(frozen=True, eq=False)
class Topology:
    """Mixing matrices of ``size`` ranks, used in turn, one in each round.

    Row ``i`` has the weights of what rank ``i`` receives, column ``j`` how rank ``j`` divides what it sends.

    Args:
        name: for messages.
        matrices: one or more, float64 ``[size, size]``, non-negative, with columns that sum to 1. Together they must
            have a path from each rank to each other one. Most algorithms also need symmetric ones: ``check_symmetric``.

    Raises:
        ValueError: a matrix breaks one of these conditions, or ranks are not connected.
    """

    name: str
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        if not self.matrices:
            raise ValueError(f"topology {self.name}: give at least one matrix")
        for matrix in self.matrices:
            _check(self.name, matrix, self.matrices[0].shape)
        object.__setattr__(self, "matrices", tuple(map(_even, self.matrices)))
        if missing := _unconnected(sum(self.matrices[1:], self.matrices[0])):
            raise ValueError(
                f"topology {self.name}: ranks are not connected, so they would never agree: nothing of rank "
                f"{missing[0]} comes to rank {missing[1]}; add edges"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.matrices[0])

    @property
    def varies(self) -> bool:
        """Whether neighbours or weights change from round to round."""
        return len(self.matrices) > 1

    @property
    def directed(self) -> bool:
        """Whether some weight is not the same in both directions."""
        return any(not np.array_equal(matrix, matrix.T) for matrix in self.matrices)

    def check_symmetric(self, who: str) -> None:
        """Raise ValueError if the topology is directed; ``who`` needs it symmetric, for the message."""
        for matrix in self.matrices:
            row, column = np.unravel_index(np.abs(matrix - matrix.T).argmax(), matrix.shape)
            if matrix[row, column] != matrix[column, row]:
                raise ValueError(
                    f"topology {self.name}: the weight of {row} and {column} is {matrix[row, column]:g} one way and "
                    f"{matrix[column, row]:g} the other. For {who} it must be symmetric, since neighbours answer each "
                    "other. Use algorithm sgp, which takes directed graphs, or ring, star, exponential or complete"
                )

    @cached_property
    def gap(self) -> float:
        """Spectral gap per round: 1 minus the modulus of the second eigenvalue. 1: ranks agree at once; 0: never."""
        if self.size == 1:
            return 1.0
        product = np.eye(self.size)
        for matrix in self.matrices:
            product = matrix @ product
        second = float(np.sort(np.abs(np.linalg.eigvals(product)))[-2])
        return max(1 - second ** (1 / len(self.matrices)), 0.0) if second > TOLERANCE else 1.0

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the matrices."""
        return zlib.crc32(b"".join(each.tobytes() for each in self.matrices))

    @cached_property
    def least(self) -> float:
        """Smallest eigenvalue of all matrices; D2 needs more than -1/3."""
        return min(float(np.linalg.eigvalsh(matrix)[0]) for matrix in self.matrices)

    def lazy(self) -> Topology:
        """Return ``(W + I) / 2``, which keeps half of the weight on the rank itself: all eigenvalues are 0 or more."""
        return Topology(f"lazy {self.name}", tuple((each + np.eye(self.size)) / 2 for each in self.matrices))

    def weights(self, rank: int, number: int) -> dict[int, float]:
        """Return the weights of a rank's neighbours in round ``number``, by rank in ascending order."""
        return _others(self.matrices[number % len(self.matrices)][rank], rank)

    def kept(self, rank: int, number: int) -> float:
        """Return the share of its own vector that a rank keeps in round ``number``."""
        return float(self.matrices[number % len(self.matrices)][rank, rank])

    def targets(self, rank: int, number: int) -> list[int]:
        """Return the ranks that receive from a rank in round ``number``, in ascending order."""
        return list(_others(self.matrices[number % len(self.matrices)][:, rank], rank))

    def describe(self) -> str:
        """Return a line for the log."""
        degrees = {len(self.weights(rank, number)) for rank in range(self.size) for number in range(len(self.matrices))}
        low, high = min(degrees), max(degrees)
        peers = f"{low}" if low == high else f"{low} to {high}"
        return f"{self.name} of {self.size} ranks, {peers} neighbours a round, spectral gap {self.gap:.3g}"


def _check(name: str, matrix: Matrix, shape: tuple[int, ...]) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape != shape or not len(matrix):
        raise ValueError(f"topology {name}: a matrix has shape {matrix.shape}; it must be square, and all of one size")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise ValueError(f"topology {name}: weights must be finite and 0 or more; the least is {matrix.min():g}")
    sums = matrix.sum(0)
    worst = int(np.abs(sums - 1).argmax())
    if abs(sums[worst] - 1) > TOLERANCE:
        rows = np.abs(matrix.sum(1) - 1).max() <= TOLERANCE
        raise ValueError(
            f"topology {name}: column {worst} sums to {sums[worst]:.9g}, and must sum to 1 (column-stochastic), else "
            "the mean of the models would move. A column says how a rank divides what it sends"
            + ("; yours has rows that sum to 1: transpose it" if rows else "")
        )


def _others(weights: Matrix, rank: int) -> dict[int, float]:
    return {peer: float(weight) for peer, weight in enumerate(weights) if weight and peer != rank}


def _even(matrix: Matrix) -> Matrix:
    """Return the matrix without tiny weights, exactly symmetric if it nearly is: both sides must see an edge."""
    even = (matrix + matrix.T) / 2 if np.abs(matrix - matrix.T).max() <= TOLERANCE else matrix
    return np.where(even > TOLERANCE, even, 0.0)


def _unconnected(matrix: Matrix) -> tuple[int, int] | None:
    """Return two ranks without a path from the first to the second, one of them rank 0; None if there are none."""
    for weights, backwards in ((matrix.T, False), (matrix, True)):
        reached = np.zeros(len(matrix), bool)
        reached[0] = True
        for _ in range(len(matrix)):
            reached |= (weights[reached] > 0).any(0)
        if not reached.all():
            other = int(reached.argmin())
            return (other, 0) if backwards else (0, other)
    return None


def metropolis(edges: Matrix) -> Matrix:
    """Return Metropolis-Hastings weights: ``1 / (1 + larger degree)`` for an edge, the rest on the diagonal.

    Args:
        edges: ``[size, size]``, symmetric; other than 0 where two ranks are neighbours.
    """
    there = (edges != 0) & ~np.eye(len(edges), dtype=bool)
    degrees = there.sum(1)
    weights = np.where(there, 1 / (1 + np.maximum.outer(degrees, degrees)), 0.0)
    return weights + np.diag(1 - weights.sum(1))


def ring(size: int) -> Topology:
    """Average each rank with the next and the previous one, with weights of a third."""
    return _shifted("ring", size, (1,))


def complete(size: int) -> Topology:
    """Average each rank with all others: the exact mean in every round."""
    return Topology("complete", (np.full((size, size), 1 / size),))


def star(size: int) -> Topology:
    """Average rank 0 with all others; it carries all the traffic."""
    edges = np.zeros((size, size))
    edges[0] = edges[:, 0] = 1
    return Topology("star", (metropolis(edges),))


def exponential(size: int) -> Topology:
    """Average each rank with those 1, 2, 4, ... ahead and behind, with equal weights (Ying et al., NeurIPS 2021)."""
    return _shifted("exponential", size, tuple(2**power for power in range(max(1, math.ceil(math.log2(max(size, 2)))))))


def one_peer(size: int) -> Topology:
    """Average each rank with one other in a round, whose index differs in one bit: exact after log2(size) rounds.

    Raises:
        ValueError: size is not a power of 2.
    """
    if size & (size - 1):
        raise ValueError(
            f"topology one_peer: {size} ranks; it pairs 2, 4, 8, ... ranks. Use 'exponential', 'ring', or a matrix; or "
            "algorithm sgp with 'one_peer_exponential'"
        )
    steps = [1 << bit for bit in range(max(1, (size - 1).bit_length()))] if size > 1 else []
    flips = [np.eye(size)[np.arange(size) ^ step] for step in steps]
    return Topology("one_peer", tuple((np.eye(size) + flip) / 2 for flip in flips) or (np.eye(1),))


def directed_ring(size: int) -> Topology:
    """Send half of each rank to the next one: a directed graph, for sgp."""
    return Topology("directed_ring", (_half_to(size, 1),))


def one_peer_exponential(size: int) -> Topology:
    """Send half of each rank to one rank in a round, by turns the one 1, 2, 4, ... ahead: a directed graph, for sgp.

    On 2, 4, 8, ... ranks, ``log2(size)`` rounds average exactly (Assran et al., ICML 2019; Ying et al., NeurIPS 2021).
    """
    hops = [1 << power for power in range(max(1, (size - 1).bit_length()))]
    return Topology("one_peer_exponential", tuple(_half_to(size, hop) for hop in hops))


def _half_to(size: int, hop: int) -> Matrix:
    return (np.eye(size) + np.eye(size)[(np.arange(size) - hop) % size]) / 2


def _shifted(name: str, size: int, shifts: Sequence[int]) -> Topology:
    matrix = np.eye(size)
    for shift in {each % size for ahead in shifts for each in (ahead, -ahead)} - {0}:
        matrix += np.eye(size)[(np.arange(size) + shift) % size]
    return Topology(name, (matrix / matrix[0].sum(),))


def from_file(path: str | Path) -> Topology:
    """Return the topology of a file: a matrix as text, or one or several ``[n, size, size]`` in .npy.

    In a text file, a row is a line of numbers, separated by spaces or commas.

    Raises:
        ValueError: the file cannot be read, or a matrix is not allowed.
    """
    place = Path(path)
    try:
        if place.suffix == ".npy":
            array = np.load(place, allow_pickle=False)
        else:
            array = np.loadtxt(place.read_text().replace(",", " ").splitlines(), ndmin=2)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"topology {str(path)!r} cannot be read as a matrix: {error}") from error
    return from_matrices(array, place.name)


def from_matrices(matrices: object, name: str = "matrix") -> Topology:
    """Return the topology of a matrix, or of several that are used in turn, given as nested lists or arrays.

    Raises:
        ValueError: see ``Topology``.
    """
    try:
        array = np.asarray(matrices, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"topology {name}: the weights are no numbers: {error}") from error
    if array.ndim not in (2, 3):
        raise ValueError(f"topology {name}: a matrix has two dimensions, this has shape {array.shape}")
    return Topology(name, tuple(array if array.ndim == 3 else array[None]))


TOPOLOGIES: Mapping[str, Callable[[int], Topology]] = {
    make.__name__: make for make in (ring, complete, star, exponential, one_peer, directed_ring, one_peer_exponential)
}
"""Functions from the number of ranks to a topology, by name."""


def build_topology(topology: object, size: int) -> Topology:
    """Return the topology for what the user passed as ``topology=``.

    Args:
        topology: a name, the path of a file, a matrix, a ``Topology``, or ``{"name": one of these, "lazy": bool}``.
        size: ranks of the run.

    Raises:
        ValueError: there is no such topology, or it has another number of ranks.
    """
    if isinstance(topology, Mapping):
        if not {"name"} <= topology.keys() <= {"name", "lazy"} or not isinstance(
            topology.get("lazy", False), bool | None
        ):
            raise ValueError(f"topology={dict(topology)!r}: give 'name', and optionally 'lazy', true or false")
        built = build_topology(topology["name"], size)
        return built.lazy() if topology.get("lazy") else built
    if isinstance(topology, Topology):
        built = topology
    elif isinstance(topology, str | Path) and str(topology) in TOPOLOGIES:
        built = TOPOLOGIES[str(topology)](size)
    elif isinstance(topology, str | Path):
        if not Path(topology).is_file():
            raise ValueError(f"topology={str(topology)!r} is no file, and none of {', '.join(TOPOLOGIES)}")
        built = from_file(topology)
    else:
        built = from_matrices(topology)
    if built.size != size:
        raise ValueError(f"topology {built.name} is of {built.size} ranks, and this run has {size}")
    return built
