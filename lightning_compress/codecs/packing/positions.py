"""Codings of the positions of a sparse message's elements, in NumPy on the host.

| name | bytes for ``count`` of ``numel`` elements | |
|---|---|---|
| int32 | 4 + 4 count | |
| int16 | 4 ceil(numel / 65536) + 2 count | in blocks of 65536; the counts of the blocks come first |
| bitmap | ceil(numel / 8) | one bit per element |
| rice | about count (1.6 + log2(numel / count)) / 8 | Golomb-Rice codes of the gaps; the length varies |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lightning_compress.codecs.packing.bits import Bytes, damaged, packed_size, prefix
from lightning_compress.codecs.packing.planes import code_bytes, pack_codes, unpack_codes

Ints = npt.NDArray[np.int64]
BLOCK = 1 << 16


class Positions(ABC):
    """Base of codings of positions.

    Args:
        numel: length of the vector; positions are below it.
        most: largest number of positions.

    Attributes:
        size: largest number of bytes.
        variable: the number of bytes depends on the positions, not only on their count.
    """

    variable: ClassVar[bool] = False
    size: int

    def __init__(self, numel: int, most: int) -> None:
        self.numel, self.most = numel, most

    @abstractmethod
    def write(self, positions: Ints, body: Bytes) -> int:
        """Write ascending positions to the beginning of ``body``, and return the number of bytes."""

    def read(self, body: Bytes) -> tuple[Ints, int]:
        """Read positions from the beginning of ``body``.

        Returns:
            Ascending positions without duplicates, and the number of bytes that were read.

        Raises:
            ValueError: ``write`` does not write such bytes.
        """
        positions, used = self._read(body)
        self.check(positions)
        return positions, used

    def check(self, positions: Ints) -> None:
        """Raise ValueError if there are too many positions, or if they are out of range or do not ascend."""
        if len(positions) > self.most:
            raise damaged(f"it has {len(positions)} positions, but at most {self.most} are possible")
        if len(positions) and not (positions[0] >= 0 and positions[-1] < self.numel and (np.diff(positions) > 0).all()):
            raise damaged(f"its positions do not ascend, or are indices outside [0, {self.numel - 1}]")

    @abstractmethod
    def _read(self, body: Bytes) -> tuple[Ints, int]:
        """Return unchecked positions, and the number of bytes that were read."""


class Int32(Positions):
    """The count as uint32, then each position as int32."""

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
        count = int(prefix(body, 4, "counts")[:4].view(np.uint32)[0])
        end = 4 + 4 * count
        return prefix(body, end, "positions")[4:].view(np.int32).astype(np.int64), end


class Int16(Positions):
    """The count of each block of 65536 elements as uint32, then each position within its block as uint16."""

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
        counts = prefix(body, middle, "counts of blocks")[:middle].view(np.uint32).astype(np.int64)
        end = middle + 2 * int(counts.sum())
        positions = prefix(body, end, "positions")[middle:].view(np.uint16).astype(np.int64)
        positions += np.repeat(np.arange(self._blocks) * BLOCK, counts)
        return positions, end


class Bitmap(Positions):
    """One bit per element, the first element lowest."""

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
        prefix(body, self.size, "bits")
        places = np.flatnonzero(body[: self.size])
        bits = np.unpackbits(body[places, None], axis=1, bitorder="little")
        rows, columns = np.nonzero(bits)
        return 8 * places[rows] + columns, self.size


class Rice(Positions):
    """Golomb-Rice codes of the gaps. A gap is the number of elements between two positions.

    A Rice code is a number's quotient by ``2^K`` in unary, and its remainder in K bits. For elements chosen at random,
    a code takes ``K + 1 + 1 / (e^(2^K density) - 1)`` bits on average: 8.1 if one element in a hundred is chosen. All
    quotients come before all remainders, so that NumPy can write and read both as whole arrays.

        | count | K | bits of the quotients | quotients, each ended by a 1 | remainders, K bits each |

    The first three are uint32. Quotients and remainders start at whole bytes, the first bit lowest.

    Golomb, "Run-Length Encodings", IEEE Transactions on Information Theory 1966. Rice, "Some Practical Universal
    Noiseless Coding Techniques", JPL Publication 79-22, 1979.
    """

    variable: ClassVar[bool] = True

    def __init__(self, numel: int, most: int) -> None:
        super().__init__(numel, most)
        self.size = rice_capacity(numel, most)

    def write(self, positions: Ints, body: Bytes) -> int:
        """See ``Positions.write``."""
        gaps = np.diff(positions, prepend=-1)
        gaps -= 1
        return write_rice(gaps, rice_parameter(self.numel, len(gaps)), body)

    def _read(self, body: Bytes) -> tuple[Ints, int]:
        gaps, used = read_rice(body)
        gaps += 1
        np.cumsum(gaps, out=gaps)
        gaps -= 1
        return gaps, used


HEADER = 12
"""Bytes before the quotients of Rice codes."""
ROUNDING = 5
"""Largest number of partly filled bytes: one of the quotients, and one per plane of the remainders, up to 4."""
MOST_BITS = 16
"""The largest K. A gap of a million then costs 16 more bits, but such gaps are rare."""


def _rice_bits(total: int, count: int, k: int) -> int:
    """Return an upper bound of the bits of ``count`` numbers whose sum is at most ``total``."""
    return count * (1 + k) + (total >> k)


def rice_parameter(total: int, count: int) -> int:
    """Return the K with the least upper bound for ``count`` numbers whose sum is at most ``total``."""
    return min(range(MOST_BITS + 1), key=lambda k: _rice_bits(total, count, k))


def rice_capacity(total: int, count: int) -> int:
    """Return the largest number of bytes for at most ``count`` numbers whose sum is at most ``total``."""
    return HEADER + -(-_rice_bits(total, count, rice_parameter(total, count)) // 8) + ROUNDING


def write_rice(numbers: Ints, k: int, out: Bytes) -> int:
    """Write Rice codes of numbers >= 0, and return the number of bytes.

    Args:
        numbers: int64 ``[n]``, n < 2^32.
        k: bits of a remainder, 0 to 16.
        out: uint8, long enough.
    """
    ends = np.cumsum((numbers >> k) + 1)
    unary = int(ends[-1]) if len(ends) else 0
    bits = np.zeros(unary, np.bool_)
    bits[ends - 1] = True
    out[:HEADER].view(np.uint32)[:] = len(numbers), k, unary
    middle, end = HEADER + packed_size(unary), HEADER + packed_size(unary) + code_bytes(len(numbers), k)
    out[HEADER:middle] = np.packbits(bits, bitorder="little")
    out[middle:end] = pack_codes(numbers & ((1 << k) - 1), k)
    return end


def read_rice(data: Bytes) -> tuple[Ints, int]:
    """Read what ``write_rice`` wrote.

    Args:
        data: uint8 that begins with Rice codes.

    Returns:
        The numbers, and the number of bytes that were read.

    Raises:
        ValueError: ``data`` is too short, or ``write_rice`` does not write such bytes.
    """
    count, k, unary = (int(number) for number in prefix(data, HEADER, "headers of Rice codes").view(np.uint32))
    if k > MOST_BITS or unary < count or (unary > 0) != (count > 0):
        raise damaged(f"{count} Rice codes with K = {k} in {unary} bits")
    middle, end = HEADER + packed_size(unary), HEADER + packed_size(unary) + code_bytes(count, k)
    prefix(data, end, "Rice codes")
    ends = np.flatnonzero(np.unpackbits(data[HEADER:middle], count=unary, bitorder="little").view(np.bool_))
    if len(ends) != count or (count and ends[-1] != unary - 1):
        raise damaged(f"it has {len(ends)} Rice codes, but its header says {count}")
    numbers = np.diff(ends, prepend=-1)
    numbers -= 1
    numbers <<= k
    numbers |= unpack_codes(data[middle:end], count, k)
    return numbers, end


KINDS: dict[str, type[Positions]] = {"int32": Int32, "int16": Int16, "bitmap": Bitmap, "rice": Rice}


def positions_of(kind: str, numel: int, most: int) -> Positions:
    """Return a coding by name. "auto" returns the one with the fewest bytes for this length and number of positions."""
    if kind != "auto":
        return KINDS[kind](numel, most)
    return min((coding(numel, most) for coding in KINDS.values()), key=lambda coding: coding.size)
