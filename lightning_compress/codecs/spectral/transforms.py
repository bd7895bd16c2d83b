"""Orthonormal transforms of short blocks, row by row."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor

from lightning_compress.core.buffers import scratch


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
    """The orthonormal discrete cosine transform DCT-II, in the order 0, n/2, 1, n - 1, 2, n - 2, and so on.

    With the odd elements first and the even ones backwards after them, ``x0, x1, x3, ..., x4, x2``, coefficients ``k``
    and ``n - k`` are the two parts of the Fourier coefficient k times ``sqrt(2) exp(i pi k / (2 n))``.

    Makhoul, "A Fast Cosine Transform in One and Two Dimensions", IEEE Transactions on Acoustics, Speech, and Signal
    Processing 1980.
    """

    width = 1

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.bins = length

    def forward(self, rows: Tensor, out: Tensor) -> None:
        """See the base class."""
        order, _, factors, _ = _cosine(self.length, rows.device)
        flat = out.squeeze(2)
        spectrum = torch.fft.rfft(torch.index_select(rows, 1, order, out=flat), norm="ortho")
        torch.mul(spectrum[:, :-1], factors, out=_pairs(flat))
        flat[:, 1] = spectrum[:, -1].real  # the first and the last one are real

    def inverse(self, coefficients: Tensor, out: Tensor) -> None:
        """See the base class."""
        _, order, _, factors = _cosine(self.length, out.device)
        flat = coefficients.squeeze(2)
        numbers = scratch("cosine", out.numel() + 2 * len(out), torch.float32, out.device).view(len(out), -1)
        spectrum = torch.view_as_complex(numbers.view(len(out), -1, 2))
        torch.mul(_pairs(flat), factors, out=spectrum[:, :-1])
        numbers[:, :: self.length] = flat[:, :2]
        numbers[:, 1 :: self.length] = 0
        torch.fft.irfft(spectrum, n=self.length, norm="ortho", out=flat)
        torch.index_select(flat, 1, order, out=out)

    def energy(self, coefficients: Tensor, out: Tensor) -> None:
        """See the base class."""
        torch.square(coefficients.squeeze(2), out=out)


def _pairs(flat: Tensor) -> Tensor:
    """Every two numbers of a row as a complex one."""
    return torch.view_as_complex(flat.view(len(flat), -1, 2))


@cache
def _cosine(length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The order of elements that makes cosines of waves, and back; what to multiply waves with, and back."""
    order = torch.cat([torch.tensor([0]), torch.arange(1, length, 2), torch.arange(length - 2, 0, -2)])
    angles = torch.arange(length // 2, dtype=torch.float64) * (math.pi / (2 * length))
    factors = torch.polar(torch.full_like(angles, math.sqrt(2)), angles)
    factors[0] = 1
    each = (order, order.argsort(), factors.to(torch.complex64), factors.reciprocal().to(torch.complex64))
    one, two, three, four = (tensor.to(device) for tensor in each)
    return one, two, three, four
