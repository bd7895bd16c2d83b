"""Codings of the positions of the few elements that a sparse message holds, all on the host in NumPy.

| name | bytes for ``count`` of ``numel`` | |
|---|---|---|
| int32 | 4 + 4 count | |
| int16 | 4 ceil(numel / 65536) + 2 count | in blocks of 65536; the number in each block comes first |
| bitmap | ceil(numel / 8) | one bit for every element |
| rice | about count (1.6 + log2(numel / count)) / 8 | Golomb-Rice codes of the gaps; varies in length |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning_compress.codecs.packing import rice
from lightning_compress.codecs.packing.bits import packed_size
from lightning_compress.codecs.variable import Bytes, damaged, take

Ints = npt.NDArray[np.int64]
Indices = Literal["int32", "int16", "bitmap", "rice"]
BLOCK = 1 << 16


class Positions(ABC):
    """A way to write down positions.

    Args:
        numel: positions are below it.
        most: how many there may be.

    Attributes:
        size: bytes that they take at most.
        variable: the bytes depend on the positions, and not only on their number.
    """

    variable: ClassVar[bool] = False
    size: int

    def __init__(self, numel: int, most: int) -> None:
        self.numel, self.most = numel, most

    @abstractmethod
    def write(self, positions: Ints, body: Bytes) -> int:
        """Write ascending positions at the beginning of ``body``; returns the bytes that they took."""

    def read(self, body: Bytes) -> tuple[Ints, int]:
        """Read positions from the beginning of ``body``.

        Returns:
            Ascending positions, none twice, and the bytes that they took.

        Raises:
            ValueError: the bytes are none that ``write`` makes.
        """
        positions, used = self._read(body)
        self.check(positions)
        return positions, used

    def check(self, positions: Ints) -> None:
        """Refuse positions that no vector has, or twice.

        Raises:
            ValueError: they are too many, do not ascend, or are not all inside.
        """
        if len(positions) > self.most:
            raise damaged(f"it has {len(positions)} positions, and {self.most} is the most")
        if len(positions) and not (positions[0] >= 0 and positions[-1] < self.numel and (np.diff(positions) > 0).all()):
            raise damaged(f"its positions, or indices outside [0, {self.numel - 1}], do not ascend")

    @abstractmethod
    def _read(self, body: Bytes) -> tuple[Ints, int]:
        """Positions, whatever they are, and the bytes that they took."""


class Int32(Positions):
    """Their number as uint32, then each as int32."""

    def __init__(self, numel: int, most: int) -> None:
        super().__init__(numel, most)
        self.size = 4 + 4 * most

    def write(self, positions: Ints, body: Bytes) -> int:
        """See ``Positions.write``."""
        end = 4 + 4 * len(positions)
        words = body[:end].view(np.int32)
        words[0] = len(positions)
        words[1:] = positions
        return end

    def _read(self, body: Bytes) -> tuple[Ints, int]:
        count = int(take(body, 4, "their number")[:4].view(np.uint32)[0])
        end = 4 + 4 * count
        return take(body, end, "positions")[4:].view(np.int32).astype(np.int64), end


class Int16(Positions):
    """The number in each block of 65536 as uint32, then each as uint16 from its block's beginning on."""

    def __init__(self, numel: int, most: int) -> None:
        super().__init__(numel, most)
        self._blocks = -(-numel // BLOCK)
        self.size = 4 * self._blocks + 2 * most

    def write(self, positions: Ints, body: Bytes) -> int:
        """See ``Positions.write``."""
        middle, end = 4 * self._blocks, 4 * self._blocks + 2 * len(positions)
        body[:middle].view(np.uint32)[:] = np.diff(np.searchsorted(positions, np.arange(self._blocks + 1) * BLOCK))
        body[middle:end].view(np.uint16)[:] = positions & (BLOCK - 1)
        return end

    def _read(self, body: Bytes) -> tuple[Ints, int]:
        middle = 4 * self._blocks
        counts = take(body, middle, "blocks")[:middle].view(np.uint32).astype(np.int64)
        end = middle + 2 * int(counts.sum())
        positions = take(body, end, "positions")[middle:].view(np.uint16).astype(np.int64)
        positions += np.repeat(np.arange(self._blocks) * BLOCK, counts)
        return positions, end


class Bitmap(Positions):
    """One bit for every element, the first one lowest."""

    def __init__(self, numel: int, most: int) -> None:
        super().__init__(numel, most)
        self.size = packed_size(numel)

    def write(self, positions: Ints, body: Bytes) -> int:
        """See ``Positions.write``."""
        body[: self.size] = 0
        places, bits = positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8)
        first = np.flatnonzero(np.diff(places, prepend=-1))
        if len(first):
            body[places[first]] = np.bitwise_or.reduceat(bits, first)
        return self.size

    def _read(self, body: Bytes) -> tuple[Ints, int]:
        take(body, self.size, "bits")
        places = np.flatnonzero(body[: self.size])
        bits = np.unpackbits(body[places, None], axis=1, bitorder="little")
        rows, columns = np.nonzero(bits)
        return 8 * places[rows] + columns, self.size


class Rice(Positions):
    """Golomb-Rice codes of the gaps, the number of elements left out between two positions."""

    variable: ClassVar[bool] = True

    def __init__(self, numel: int, most: int) -> None:
        super().__init__(numel, most)
        self.size = rice.capacity(numel, most)

    def write(self, positions: Ints, body: Bytes) -> int:
        """See ``Positions.write``."""
        gaps = np.diff(positions, prepend=-1)
        gaps -= 1
        return rice.write(gaps, rice.parameter(self.numel, len(gaps)), body)

    def _read(self, body: Bytes) -> tuple[Ints, int]:
        gaps, used = rice.read(body)
        gaps += 1
        np.cumsum(gaps, out=gaps)
        gaps -= 1
        return gaps, used


KINDS: dict[str, type[Positions]] = {"int32": Int32, "int16": Int16, "bitmap": Bitmap, "rice": Rice}


def positions_of(kind: str, numel: int, most: int) -> Positions:
    """A coding by name; "auto" is the one that takes the fewest bytes, at most, for this length and number."""
    if kind != "auto":
        return KINDS[kind](numel, most)
    return min((each(numel, most) for each in KINDS.values()), key=lambda coding: coding.size)


assert get_args(Indices) == tuple(KINDS)
