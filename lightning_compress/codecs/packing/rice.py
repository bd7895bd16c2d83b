"""Golomb-Rice codes: a number as its quotient by ``2^K`` in unary and its remainder in K bits.

    Golomb, "Run-Length Encodings", IEEE Transactions on Information Theory 1966. Rice, "Some Practical Universal
    Noiseless Coding Techniques", JPL Publication 79-22, 1979.

They suit the gaps between elements that are chosen at random: ``K + 1 + 1 / (e^(2^K density) - 1)`` bits each, 8.1
where one in a hundred is chosen. All quotients stand before all remainders, which changes no length, and lets both be
written and read by whole vectors of them. It is NumPy on the host: a length must be known there anyhow.

    | count | K | bits of the quotients | quotients, each ended by a 1 | remainders, K bits each |

The first three are uint32; quotients and remainders begin at a byte, the first bit lowest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_compress.codecs.packing.bits import packed_size
from lightning_compress.codecs.packing.planes import code_bytes, pack_codes, unpack_codes
from lightning_compress.codecs.variable import Bytes, damaged, take

Ints = npt.NDArray[np.int64]
HEADER = 12
ROUNDING = 5
"""Bytes that are not full: of the quotients, and of up to 4 planes of remainders."""
MOST_BITS = 16
"""The largest K; gaps of a million then cost 16 bits more, but there are few of them."""


def bits_at_most(total: int, count: int, k: int) -> int:
    """Bits of ``count`` numbers whose sum is at most ``total``."""
    return count * (1 + k) + (total >> k)


def parameter(total: int, count: int) -> int:
    """The K whose bound is least for ``count`` numbers whose sum is at most ``total``."""
    return min(range(MOST_BITS + 1), key=lambda k: bits_at_most(total, count, k))


def capacity(total: int, count: int) -> int:
    """Bytes that ``write`` takes at most for ``count`` numbers, or fewer, whose sum is at most ``total``."""
    return HEADER + -(-bits_at_most(total, count, parameter(total, count)) // 8) + ROUNDING


def write(numbers: Ints, k: int, out: Bytes) -> int:
    """Write numbers >= 0.

    Args:
        numbers: int64 ``[n]``, n < 2^32.
        k: bits of a remainder, 0 to 16.
        out: uint8, long enough.

    Returns:
        Bytes written.
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


def read(data: Bytes) -> tuple[Ints, int]:
    """Read numbers back.

    Args:
        data: uint8 that begins with what ``write`` wrote.

    Returns:
        The numbers, and the bytes that they took.

    Raises:
        ValueError: ``data`` is too short, or nothing that ``write`` makes.
    """
    count, k, unary = (int(number) for number in take(data, HEADER, "the head of Rice codes").view(np.uint32))
    if k > MOST_BITS or unary < count or (unary > 0) != (count > 0):
        raise damaged(f"{count} Rice codes with K = {k} in {unary} bits")
    middle, end = HEADER + packed_size(unary), HEADER + packed_size(unary) + code_bytes(count, k)
    take(data, end, "Rice codes")
    ends = np.flatnonzero(np.unpackbits(data[HEADER:middle], count=unary, bitorder="little").view(np.bool_))
    if len(ends) != count or (count and ends[-1] != unary - 1):
        raise damaged(f"{len(ends)} Rice codes where {count} should be")
    numbers = np.diff(ends, prepend=-1)
    numbers -= 1
    numbers <<= k
    numbers |= unpack_codes(data[middle:end], count, k)
    return numbers, end
