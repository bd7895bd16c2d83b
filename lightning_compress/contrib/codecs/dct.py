"""Sparsification in the frequency domain: the largest coefficients of every block's cosine transform."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_compress.codecs.spectral.spectrum import Spectral, Transform
from lightning_compress.core.workspace import scratch


@dataclass(frozen=True)
class DCT(Spectral):
    """Send the share ``1 - theta`` of the cosine (DCT-II) coefficients of each block that is largest in magnitude.

    As FFT, with ``n`` real coefficients to a block of ``n`` elements, ``k = max(1, ceil((1 - theta) n))`` of which are
    sent: about ``(1 - theta) * bits + 1 + 96 / block`` bits per element (2.9 for the defaults), or
    ``(1 - theta) * (bits + 16) + 96 / block`` above theta 0.94. The squared norm of what is dropped is at most
    ``theta`` of the vector's, so the method contracts; error feedback is on by default. No jump arises between the
    two ends of a block, so smooth data need fewer coefficients than with FFT. Messages are those of FFT, with single
    numbers for pairs; coefficients are counted in the order 0, n/2, 1, n - 1, 2, n - 2, and so on. As there, only ranks
    on one kind of processor have equal bits.

    Args:
        theta: share that is dropped, in [0, 1): 0 drops nothing; near 1 sends one coefficient of each block.
        block: elements that are transformed together, a power of two from 64 (more ranges, least work) to 65536.
        bits: of a coefficient, 2 (coarsest) to 16, or 32.
        mantissa: bits of mantissa among them, 0 (widest reach) to ``min(bits - 1, 23)`` (finest), or "auto", the least
            squared error on a few blocks of each message. Theta 0, 32 bits and mantissa 23 return the vector to 1e-6.

    Raises:
        ValueError: a setting is none of these; or, from ``decode``, the message's places are damaged.

    The pipeline of Wang, Wu, Zhang, Liu, Bosilca, Herlihy, Fonseca, HPDC 2020, arXiv 1811.08596, with the transform of
    Ahmed, Natarajan, Rao, "Discrete Cosine Transform", IEEE Transactions on Computers 1974, that Peng, Quesnelle,
    Kingma, "DeMo: Decoupled Momentum Optimization", arXiv 2411.19870, use for momentum.
    """

    name: ClassVar[str] = "dct"
    theta: float = 0.85
    block: int = 256
    bits: int = 10
    mantissa: int | Literal["auto"] = "auto"

    def transform(self, length: int) -> Cosine:
        """The transform of blocks of this length."""
        return Cosine(length)


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
