"""Stochastic rounding to evenly spaced levels, packed: what the codecs with a few bits per element share."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.packing.planes import Planes
from lightning_compress.core.buffers import scratch
from lightning_compress.core.random import RandomBits, Stream

SMALLEST, LARGEST = 2.0**-100, torch.finfo(torch.float32).max
BITS = 8
"""The most that a code of even levels has."""
UNIT = 1 << 16
"""Random numbers per level: the probability of rounding up is a multiple of 1 / UNIT."""


def more_bits(ranks: int) -> int:
    """Bits by which the variance of rounding to even levels falls to ``1 / ranks``: by 4 a bit, since steps halve."""
    return math.ceil(math.log2(ranks) / 2)


class Quantiser:
    """Rounds ``v / step`` to ``2^bits`` numbers or one fewer, evenly spaced around 0, and packs them.

    The numbers are ``level + shift`` with integer levels from ``-2^(bits-1)`` (or one more if shift is 0) to
    ``2^(bits-1) - 1``, stored as two's complements in planes (``codecs/packing/planes.py``). Rounding takes the lower
    neighbour or the upper one with probabilities that make the mean exact (to 2^-17 of a step), and leaves neighbours
    alone.

    Args:
        bits: 2 to 8.
        shift: 0.0 for numbers among which is 0, 0.5 for as many on either side.
        count: numbers in a message.
        most: numbers in the largest piece that is rounded at a time.
        device: where.

    Attributes:
        top, sign, shift: the largest number, the highest bit of a code, and as given.
        planes, size: where codes stand in a message, and how many bytes they take.
    """

    def __init__(self, bits: int, shift: float, count: int, most: int, device: torch.device) -> None:
        self.top = 2 ** (bits - 1) - 1 + shift
        self.planes = Planes(bits, count)
        self.size = self.planes.size
        self.sign, self.shift = 2 ** (bits - 1), shift
        self._floats = scratch("levels", most, torch.float32, device)
        self._codes = scratch("codes", -(-most // 8) * 8, torch.uint8, device)
        self._random = RandomBits(most, device)
        # Random numbers are -32768 to 32767: brought to the middles of the UNIT parts of [0, 1).
        self._offset = torch.tensor(0.5 + 0.5 / UNIT - shift, dtype=torch.float32, device=device)
        self._top = torch.tensor(self.top, dtype=torch.float32, device=device)

    def fit(self, norms: Tensor, largest: float = LARGEST) -> tuple[Tensor, Tensor]:
        """What to send for the norms of blocks, and what to multiply elements with.

        Args:
            norms: float64; at least the largest magnitude of each block.
            largest: norms above it are sent as 0, as are those below 2^-100, so that the block stays as it is.

        Returns:
            float32 norms, and factors that bring elements to ``UNIT`` times the numbers' scale, never beyond top.
        """
        return fit(norms, self.top, largest)

    def steps(self, norms: Tensor) -> Tensor:
        """The distance between two numbers of blocks with these norms; such that no number overflows."""
        steps: Tensor = norms / self._top  # by a number of Python's, an accelerator would multiply with its inverse
        return steps.clamp_(max=LARGEST / self.top * (1 - 2**-22))

    def encode(self, rows: Tensor, factors: Tensor, elements: slice, stream: Stream, body: Tensor) -> Tensor:
        """Round and pack.

        Args:
            rows: float32, contiguous.
            factors: from ``fit``, broadcast to ``rows``.
            elements: which numbers of the message these are; starts at a multiple of 8.
            stream: where the randomness comes from.
            body: uint8 ``[size]``, in which the bytes of these numbers are overwritten.

        Returns:
            The numbers, of the shape of ``rows``; in scratch.
        """
        numel = rows.numel()
        floats = torch.mul(rows, factors, out=self._floats[:numel].view(rows.shape))
        random = self._random.draw(stream.key, elements.start, numel, stream.offset).view(rows.shape)
        if rows.device.type == "cpu":  # torch would allocate a cast of the random numbers
            np.add(floats.numpy(), random.numpy(), out=floats.numpy())
        else:
            floats.add_(random)
        torch.add(self._offset, floats, alpha=1 / UNIT, out=floats).floor_()
        codes = self._codes[: -(-numel // 8) * 8]
        codes.view(torch.int8)[:numel].view(rows.shape).copy_(floats)
        codes[numel:] = 0
        self.planes.write(codes, elements, body)
        return floats.add_(self.shift) if self.shift else floats

    def decode(self, body: Tensor, elements: slice, shape: tuple[int, ...]) -> Tensor:
        """The numbers of a message's piece, float32 of this shape; in scratch."""
        numel = elements.stop - elements.start
        codes = self._codes[: -(-numel // 8) * 8]
        self.planes.read(codes, elements, body)
        codes.bitwise_xor_(self.sign).sub_(self.sign)  # extends the sign; uint8 wraps
        floats = self._floats[:numel].copy_(codes.view(torch.int8)[:numel]).view(shape)
        return floats.add_(self.shift) if self.shift else floats


def check_correlated(method: str, correlated: object) -> None:
    """Refuse what is no boolean.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(correlated, bool):
        raise ValueError(
            f"{method}(correlated={correlated!r}): it must be true (ranks round by random bits that they share, and "
            "their errors cancel in part) or false"
        )


def fit(norms: Tensor, top: float, largest: float = LARGEST) -> tuple[Tensor, Tensor]:
    """What to send for norms, and the factors that bring them to ``UNIT * top`` at most; see ``Quantiser.fit``."""
    sent = norms.clamp(max=LARGEST).float()
    sent.masked_fill_((sent < SMALLEST) | (sent > largest), 0)
    exact = UNIT * top / sent.double()
    factors = exact.float()
    factors = torch.where(factors.double() > exact, factors.nextafter(factors.new_zeros(())), factors)
    return sent, factors.masked_fill_(sent == 0, 0)
