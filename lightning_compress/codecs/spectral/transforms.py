"""Orthonormal transforms of short blocks, row by row."""

from __future__ import annotations

from abc import ABC, abstractmethod

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
