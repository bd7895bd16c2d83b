"""Orthonormal transforms of short blocks, row by row."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor


class Transform(ABC):
    """A change of basis of rows of one length that keeps their norm.

    Args:
        length: of a row; a power of two.

    Attributes:
        bins: coefficients of a row, each of which is kept or dropped as a whole.
        width: float32 numbers of a coefficient.
    """

    bins: int
    width: int

    def __init__(self, length: int) -> None:
        self.length = length

    @abstractmethod
    def forward(self, rows: Tensor, out: Tensor) -> None:
        """Coefficients, float32 ``[R, bins, width]``, of float32 ``[R, length]``."""

    @abstractmethod
    def inverse(self, coefficients: Tensor, out: Tensor) -> None:
        """Rows again; the coefficients may be lost."""

    @abstractmethod
    def energy(self, coefficients: Tensor, out: Tensor) -> None:
        """The squared magnitude of every coefficient, float32 ``[R, bins]``; the coefficients stay."""


class RealFourier(Transform):
    """The discrete Fourier transform of real rows: ``length / 2 + 1`` complex coefficients, scaled by 1/sqrt(length).

    The first and the last one are real. All others stand for two coefficients of the full spectrum, so only they count
    twice in the norm.
    """

    width = 2

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.bins = length // 2 + 1

    def forward(self, rows: Tensor, out: Tensor) -> None:
        """See the base class."""
        torch.fft.rfft(rows, norm="ortho", out=torch.view_as_complex(out))

    def inverse(self, coefficients: Tensor, out: Tensor) -> None:
        """See the base class."""
        torch.fft.irfft(torch.view_as_complex(coefficients), n=self.length, norm="ortho", out=out)

    def energy(self, coefficients: Tensor, out: Tensor) -> None:
        """See the base class."""
        real, imaginary = coefficients.unbind(2)
        torch.mul(real, real, out=out).addcmul_(imaginary, imaginary)


class Cosine(Transform):
    """The discrete cosine transform DCT-II as a product with an orthogonal matrix: as many coefficients as elements."""

    width = 1

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.bins = length

    def forward(self, rows: Tensor, out: Tensor) -> None:
        """See the base class."""
        torch.mm(rows, _cosines(self.length, rows.device).T, out=out.squeeze(2))

    def inverse(self, coefficients: Tensor, out: Tensor) -> None:
        """See the base class."""
        torch.mm(coefficients.squeeze(2), _cosines(self.length, out.device), out=out)

    def energy(self, coefficients: Tensor, out: Tensor) -> None:
        """See the base class."""
        torch.square(coefficients.squeeze(2), out=out)


@cache
def _cosines(length: int, device: torch.device) -> Tensor:
    """Row k holds ``sqrt(2 / n) cos(pi k (2 i + 1) / (2 n))``, and row 0 ``sqrt(1 / n)``."""
    steps = torch.arange(length, dtype=torch.float64)
    angles = steps.view(-1, 1) * (2 * steps + 1) * (math.pi / (2 * length))
    matrix = torch.cos(angles) * math.sqrt(2 / length)
    matrix[0] = math.sqrt(1 / length)
    return matrix.float().to(device)
