"""Sparsification in the frequency domain: the largest coefficients of every block's cosine transform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_compress.codecs.spectral.spectrum import Spectral
from lightning_compress.codecs.spectral.transforms import Cosine


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
