"""Sparsification in the frequency domain: sends the largest coefficients of each block's cosine transform."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_compress.codecs.spectral.spectrum import Spectral
from lightning_compress.codecs.spectral.transform import Transform
from lightning_compress.core.workspace import scratch


@dataclass(frozen=True)
class DCT(Spectral):
    """Send the largest cosine coefficients (DCT-II) of each block, a share of ``1 - theta``.

    It works as ``FFT``, with ``n`` real coefficients for a block of ``n`` elements. ``k = max(1, ceil((1 - theta) n))``
    of them are sent, which takes about ``(1 - theta) * bits + 1 + 96 / block`` bits per element (2.9 for the defaults),
    or ``(1 - theta) * (bits + 16) + 96 / block`` above theta 0.94. The squared norm of what is dropped is at most
    ``theta`` times the vector's, so the method is contractive; error feedback is on by default. Unlike FFT, DCT has no
    jump between the two ends of a block, so smooth data need fewer coefficients. Messages are those of FFT, with single
    numbers instead of pairs, in the order of coefficients 0, n/2, 1, n - 1, 2, n - 2, and so on. As with FFT, only
    ranks on the same kind of processor are bit-identical.

    Args:
        theta: share of coefficients that is dropped, in [0, 1): 0 drops none; near 1 sends one in each block.
        block: elements that are transformed together, a power of two from 64 (more ranges, least work) to 65536.
        bits: for each coefficient, 2 (coarsest) to 16, or 32.
        mantissa: how many of these bits are the mantissa, 0 (widest range) to ``min(bits - 1, 23)`` (finest). "auto"
            takes the least squared error on a few blocks of each message. With theta 0, 32 bits and mantissa 23, the
            vector is reproduced to 1e-6.

    Raises:
        ValueError: a setting is out of range; or, from ``decode``, the positions in a message are damaged.

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
        """Return the transform of blocks of this length."""
        return Cosine(length)


class Cosine(Transform):
    """The orthonormal discrete cosine transform DCT-II, in the order 0, n/2, 1, n - 1, 2, n - 2, and so on.

    It is computed by an FFT of the reordered elements ``x0, x1, x3, ..., x4, x2``: the odd ones first, then the even
    ones backwards. Coefficients ``k`` and ``n - k`` are the real and imaginary part of the Fourier coefficient k times
    ``sqrt(2) exp(i pi k / (2 n))``.

    Makhoul, "A Fast Cosine Transform in One and Two Dimensions", IEEE Transactions on Acoustics, Speech, and Signal
    Processing 1980.
    """

    width = 1

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.bins = length

    def forward(self, rows: Tensor, out: Tensor) -> None:
        """See ``Transform``."""
        order, _, factors, _ = _cosine(self.length, rows.device)
        flat = out.squeeze(2)
        spectrum = torch.fft.rfft(torch.index_select(rows, 1, order, out=flat), norm="ortho")
        torch.mul(spectrum[:, :-1], factors, out=_pairs(flat))
        flat[:, 1] = spectrum[:, -1].real  # the first and the last coefficient are real

    def inverse(self, coefficients: Tensor, out: Tensor) -> None:
        """See ``Transform``."""
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
        """See ``Transform``."""
        torch.square(coefficients.squeeze(2), out=out)


def _pairs(flat: Tensor) -> Tensor:
    """View every two numbers of a row as a complex number."""
    return torch.view_as_complex(flat.view(len(flat), -1, 2))


@cache
def _cosine(length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the order of the elements and its inverse, the factors of the coefficients and their inverse."""
    order = torch.tensor([0, *range(1, length, 2), *range(length - 2, 0, -2)], dtype=torch.int64)
    angles = torch.arange(length // 2, dtype=torch.float64) * (math.pi / (2 * length))
    factors = torch.polar(torch.full_like(angles, math.sqrt(2)), angles)
    factors[0] = 1
    inverse, wide = order.argsort().to(device), torch.complex64
    return order.to(device), inverse, factors.to(device, wide), factors.reciprocal().to(device, wide)
