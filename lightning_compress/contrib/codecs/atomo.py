"""ATOMO: sends a random few of the singular vectors of each gradient matrix; unbiased."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.core.random import mix
from lightning_compress.core.workspace import scratch

TINY = 2.0**-126


@dataclass(frozen=True)
class ATOMO(Codec):
    """Send s atoms ``l_i / p_i u_i v_i^T`` of each matrix ``sum of l_i u_i v_i^T``, atom i with probability ``p_i``.

    ``p_i = min(1, s l_i / sum of l)``. Atoms with ``p_i = 1`` are set aside, and the others share the rest of s. Of all
    probabilities that sum to s, these have the least variance, ``sum of l_i^2 (1 / p_i - 1)``. The method is exactly
    unbiased. The paper tosses a coin for each atom. Here one number u decides for all: atom i is sent if one of ``u``,
    ``u + 1``, ... falls into its interval of length ``p_i``. The probabilities are the same; the variance is too,
    because atoms are orthogonal; and there are always s atoms.

    A parameter of shape ``(n, ...)`` is a matrix of n rows. If a vector holds a part of a parameter, its whole rows are
    the matrix. Incomplete rows, and matrices with ``s (n + m) >= n m``, are sent as float32. A message holds these
    first, then s vectors ``u_i`` and s vectors ``l_i / p_i v_i`` of each matrix, padded with zeros: ``32 s (n + m) /
    (n m)`` bits per element. A matrix whose elements are all below 2^-126 counts as zero. No state. Error feedback is
    off: the residual is often larger than the vector and would grow. Exchanges that cut vectors gain little, since each
    part of a matrix has its own factors; ``auto`` uses all_gather.

    It is slow: encoding decomposes matrices, in time ``min(n, m)^2 max(n, m)`` and in memory of up to four times the
    largest matrix, and an accelerator waits for it.

    Args:
        rank: s, 1 or more. If s is too large for every matrix, everything is sent as float32.

    Raises:
        ValueError: rank is out of range.

    Wang, Sievert, Charles, Liu, Wright, Papailiopoulos, "ATOMO: Communication-efficient Learning via Atomic
    Sparsification", NeurIPS 2018, arXiv 1806.04090.
    """

    name: ClassVar[str] = "atomo"
    sparse: ClassVar[bool] = True
    rank: int = 3

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"ATOMO(rank={self.rank!r}): rank must be an integer, at least 1; try 3")

    @property
    def safe_with_adam(self) -> bool:
        """See ``Codec``: no, its noise is many times the gradient."""
        return False

    def refined(self, ranks: int) -> Codec:
        """See ``Codec.refined``: as many atoms as all ranks send together."""
        return replace(self, rank=ranks * self.rank)

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; messages are not summed, so ``summands`` has no effect."""
        return _ATOMOPlan(layout, device, self.rank)


@dataclass(frozen=True)
class _Matrix:
    """A matrix ``[rows, columns]`` at ``start`` of a vector, handled as its transpose if it has more rows."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def short(self) -> int:
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        return max(self.rows, self.columns)

    def view(self, vector: Tensor) -> Tensor:
        """Return a view ``[short, long]`` of the vector."""
        matrix = vector[self.start : self.stop].view(self.rows, self.columns)
        return matrix if self.rows <= self.columns else matrix.mT


class _ATOMOPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, rank: int) -> None:
        super().__init__(layout)
        self._rank = rank
        matrices = map(_whole_rows, layout.segments)
        self._matrices = [m for m in matrices if rank * (m.rows + m.columns) < m.rows * m.columns]
        edges = [0, *(edge for m in self._matrices for edge in (m.start, m.stop)), layout.numel]
        dense = [slice(*edge) for edge in zip(edges[::2], edges[1::2], strict=True) if edge[0] < edge[1]]
        self._dense, end = [], 0
        for part in dense:
            self._dense.append((part, slice(end, end + part.stop - part.start)))
            end += part.stop - part.start
        self._atoms = []
        for m in self._matrices:
            middle = end + rank * m.short
            self._atoms.append((slice(end, middle), slice(middle, middle + rank * m.long)))
            end = middle + rank * m.long
        self.message_size = 4 * end
        largest = max((m.short * m.long for m in self._matrices), default=0)
        self._scaled, self._rights = (
            scratch(name, largest, torch.float32, device) for name in ("atomo matrix", "atomo right vectors")
        )

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        self.check(vector, message)
        words = message.view(torch.float32)
        for part, place in self._dense:
            words[place] = vector[part]
            vector[part] = 0.0
        for number, (matrix, (left, right)) in enumerate(zip(self._matrices, self._atoms, strict=True)):
            lefts, rights = words[left].view(self._rank, -1), words[right].view(self._rank, -1)
            values = matrix.view(vector)
            self._draw(values, lefts, rights, mix(key, number) / 2**64)
            values.addmm_(lefts.mT, rights, alpha=-1)

    def _draw(self, matrix: Tensor, lefts: Tensor, rights: Tensor, u: float) -> None:
        """Write the atoms that the random number u selects.

        ``matrix = sum of u_i (u_i^T matrix)`` holds for any orthonormal U, so float32 errors in small eigenvalues add a
        little variance and no bias.
        """
        lowest, highest = torch.aminmax(matrix)
        largest = max(-float(lowest), float(highest))
        lefts.zero_()
        rights.zero_()
        if largest < TINY:
            return
        scaled, products = (part[: matrix.numel()].view(matrix.shape) for part in (self._scaled, self._rights))
        torch.mul(matrix, 1 / largest, out=scaled)
        vectors = torch.linalg.eigh(scaled @ scaled.mT).eigenvectors
        torch.mm(vectors.mT, scaled, out=products)
        norms = torch.linalg.vector_norm(products, dim=1, dtype=torch.float64)
        norms, order = norms.cpu().sort(descending=True)
        chosen, probabilities = sample(norms.numpy(), self._rank, u)
        places = order[torch.from_numpy(chosen)].to(matrix.device)
        factors = torch.from_numpy(largest / probabilities).to(matrix.device)
        limit = torch.finfo(torch.float32).max / (4 * self._rank)
        lefts[: len(places)] = vectors[:, places].mT
        rights[: len(places)] = (products[places] * factors[:, None]).clamp_(-limit, limit)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        if not accumulate:
            out.zero_()
        rows = [message.view(torch.float32) for message in messages]
        for row in rows:
            for part, place in self._dense:
                out[part].add_(row[place], alpha=weight)
        for matrix, atoms in zip(self._matrices, self._atoms, strict=True) if rows else ():
            left, right = (torch.cat([row[place].view(self._rank, -1) for row in rows]) for place in atoms)
            matrix.view(out).addmm_(left.mT, right, alpha=weight)


def sample(values: npt.NDArray[np.float64], s: int, u: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Choose at most s atoms.

    Args:
        values: singular values of the atoms, descending, 0 or more.
        s: number of atoms to choose.
        u: a random number, uniform in [0, 1).

    Returns:
        indices of the chosen atoms, and their probabilities.
    """
    rests = np.cumsum(values[::-1])[::-1]  # sum of each value and those after it
    shares = np.arange(s, 0, -1)
    certain = values[:s] * shares[: len(values)] > rests[:s]
    first = len(certain) if certain.all() else int(np.argmin(certain))
    chosen = np.arange(first)
    if first < len(values) and rests[first] > 0 and first < s:
        ends = np.cumsum(values[first:])
        points = (u + np.arange(s - first)) * (ends[-1] / (s - first))
        drawn = first + np.minimum(np.searchsorted(ends, points, side="right"), len(ends) - 1)
        chosen = np.concatenate([chosen, drawn])
        odds = values[drawn] * ((s - first) / ends[-1])
    else:
        odds = np.empty(0)
    return chosen, np.concatenate([np.ones(first), odds])


def _whole_rows(segment: Segment) -> _Matrix:
    """Return the matrix of the whole rows in a segment of a parameter."""
    columns = math.prod(segment.shape[1:]) if segment.shape else 1
    skipped = -segment.start % max(1, columns)
    rows = max(0, segment.numel - skipped) // max(1, columns)
    return _Matrix(segment.offset + skipped, rows, columns)
