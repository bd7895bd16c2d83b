"""The contract of a transform of blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Transform(ABC):
    """An orthonormal transform of rows of one length.

    Args:
        length: length of a row; a power of two.

    Attributes:
        bins: coefficients of a row. Each is sent or dropped as a whole.
        width: float32 numbers of a coefficient.
    """

    bins: int
    width: int

    def __init__(self, length: int) -> None:
        self.length = length

    @abstractmethod
    def forward(self, rows: Tensor, out: Tensor) -> None:
        """Write to ``out``, float32 ``[R, bins, width]``, the coefficients of ``rows``, float32 ``[R, length]``."""

    @abstractmethod
    def inverse(self, coefficients: Tensor, out: Tensor) -> None:
        """Write the rows of ``coefficients`` to ``out``; see ``forward``. The coefficients may be overwritten."""

    @abstractmethod
    def energy(self, coefficients: Tensor, out: Tensor) -> None:
        """Write the squared magnitude of every coefficient to ``out``, float32 ``[R, bins]``."""
