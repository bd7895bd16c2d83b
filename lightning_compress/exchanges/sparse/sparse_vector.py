"""Sparse vectors that can be cut into parts and sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.exchanges.sparse import coding


@dataclass(frozen=True)
class SparseVector:
    """A sparse vector of ``numel`` elements.

    Args:
        numel: the length of the vector.
        indices: int64 ``[count]``, strictly ascending; None: all indices.
        values: float32 ``[count]``.
    """

    numel: int
    indices: Tensor | None
    values: Tensor

    @classmethod
    def of(cls, vector: Tensor) -> SparseVector:
        """Return the elements of a vector that are not 0."""
        indices = coding.indices_of(vector)
        return cls(len(vector), None, vector) if len(indices) == len(vector) else cls.at(indices, vector)

    @classmethod
    def at(cls, indices: Tensor | None, vector: Tensor) -> SparseVector:
        """Return the elements of a vector at these indices."""
        return cls(len(vector), indices, vector if indices is None else vector[indices])

    @classmethod
    def read(cls, message: Tensor, numel: int) -> SparseVector:
        """Return the sparse vector that ``write`` wrote.

        Raises:
            ValueError: the message is damaged.
        """
        indices, values = coding.read_entries(message, numel, exact=True)
        coding.check_ascending(indices, numel)
        return cls(numel, indices, values)

    def write(self, message: Tensor) -> int:
        """Write all elements, and return the bytes of the message."""
        if self.indices is None:
            return coding.write_dense(self.numel, self.values, message)
        return coding.write_entries(self.indices, self.values, self.numel, message, exact=True)

    def cuts(self, bounds: Sequence[int]) -> list[int]:
        """Return, for each of ``bounds``, how many elements have a smaller index."""
        if self.indices is None:
            return list(bounds)
        return [int(cut) for cut in torch.searchsorted(self.indices, torch.tensor(bounds, device=self.indices.device))]

    def part(self, start: int, stop: int, first: int, last: int) -> SparseVector:
        """Return the elements ``[first, last)``, which are those with indices in ``[start, stop)``."""
        indices = None if self.indices is None else self.indices[first:last] - start
        if indices is not None and len(indices) == stop - start:
            indices = None
        return SparseVector(stop - start, indices, self.values[first:last])

    @property
    def used_bytes(self) -> int:
        """Bytes of the message that ``write`` writes."""
        return int(coding.used_bytes(len(self.values), self.numel, exact=True))

    def add_to(self, out: Tensor) -> None:
        """Add the elements to ``out``, float32 ``[numel]``."""
        if self.indices is None:
            out.add_(self.values)
        else:
            out.index_add_(0, self.indices, self.values)
