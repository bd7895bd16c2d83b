"""Weighted means with neighbours: exact here, with few bits in ``moniqua.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_compress.core.workspace import chunk_size, pieces
from lightning_compress.gossip.neighbours import Neighbours


class Averaging(ABC):
    """What moves a vector towards those of its neighbours.

    Attributes:
        numbers: what there is to keep between rounds, by name, and how it begins.
        vectors: likewise, tensors; changed in place.
    """

    numbers: Mapping[str, float]
    vectors: Mapping[str, Tensor]

    @abstractmethod
    def average(self, vector: Tensor, numbers: dict[str, float], rate: float, moved: Tensor | None = None) -> None:
        """``vector += sum_j W_ij (vector_j - vector)``, in place.

        Args:
            vector: see ``Mixing.mix``.
            numbers: what is kept, changed in place; ``round`` is that of this round.
            rate: see ``Mixing.mix``.
            moved: float32 ``[numel]``; what is added to the vector is added to it too, before the vector rounds it.
        """

    def figures(self) -> dict[str, float]:
        """What else there is to tell, by name."""
        return {}


class Exact(Averaging):
    """Whole vectors, as float32."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.numbers, self.vectors = {}, {}
        self._neighbours = neighbours

    def average(self, vector: Tensor, numbers: dict[str, float], rate: float, moved: Tensor | None = None) -> None:
        """See ``Averaging``."""
        number = int(numbers["round"])
        weights = self._neighbours.weights(number)
        add_differences(vector, self._neighbours.tell(vector, number), weights, moved)


def add_differences(
    vector: Tensor, theirs: dict[int, Tensor], weights: dict[int, float], moved: Tensor | None = None
) -> None:
    """Move towards neighbours' vectors; ``moved``: see ``Averaging.average``.

    Differences are added, and not vectors: what an edge moves on one side, it moves back on the other, bit for bit.
    """
    for piece in pieces(len(vector), chunk_size(vector.device)):
        own = vector[piece]
        total = torch.zeros_like(own)
        for peer, weight in weights.items():
            total.add_(theirs[peer][piece] - own, alpha=weight)
        own.add_(total)
        if moved is not None:
            moved[piece].add_(total)
