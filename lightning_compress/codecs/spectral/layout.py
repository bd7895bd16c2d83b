"""Where a spectral codec's blocks stand in the vector and in the message."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from lightning_compress.codecs.base import aligned
from lightning_compress.codecs.packing.planes import Planes
from lightning_compress.codecs.spectral.bins import Places
from lightning_compress.codecs.spectral.transforms import Transform

SHORTEST = 8
"""The least length that a rest is filled up to."""
SAMPLE = 8
"""Blocks that the mantissa is chosen on."""


class SpectralSettings(Protocol):
    """Of a spectral codec, see ``spectrum.py``."""

    @property
    def theta(self) -> float:
        """Share of the coefficients that is dropped."""

    @property
    def bits(self) -> int:
        """Of a code."""

    def transform(self, length: int) -> Transform:
        """The transform of blocks of this length."""


def stretches(numel: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Start, number and length of a vector's whole blocks, and of its rest, where there are any."""
    whole, rest = divmod(numel, block)
    if whole:
        yield 0, whole, block
    if rest:
        yield whole * block, 1, rest


class Area:
    """Blocks of one length: their place in the vector and in the message.

    Args:
        codec: its settings.
        start: where the blocks begin in the vector.
        blocks: how many.
        length: elements of a block.
        offset: where they begin in the message.
    """

    def __init__(self, codec: SpectralSettings, start: int, blocks: int, length: int, offset: int) -> None:
        self.start, self.blocks, self.length = start, blocks, length
        self.transform = transform = codec.transform(1 << max(length - 1, SHORTEST - 1).bit_length())
        self.padded = transform.length
        keep = max(1, math.ceil((1 - codec.theta) * transform.bins - 1e-9))  # 1 - 0.9 is above 0.1
        self.places = Places(transform.bins, keep)
        self.values = keep * transform.width
        self.planes = Planes(codec.bits, blocks * self.values)
        self.ranges = slice(offset, offset + 12 * blocks)
        self.where = aligned(self.ranges.stop)
        self.codes = aligned(self.where + blocks * self.places.size)
        self.stop = aligned(self.codes + self.planes.size)
        self.gaps = (
            slice(self.ranges.stop, self.where),
            slice(self.where + blocks * self.places.size, self.codes),
            slice(self.codes + self.planes.size, self.stop),
        )
        # A value that is scaled down by no more than this overflows in no sum of an inverse transform.
        self.limit = 126 - 2 * (self.padded.bit_length() - 1)

    @property
    def sample(self) -> range:
        """The blocks that the mantissa is chosen on, if these are the first ones."""
        return range(0, self.blocks, -(-self.blocks // min(SAMPLE, self.blocks)))
