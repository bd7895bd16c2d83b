"""Elias' omega code: positive integers, small ones in few bits, without an upper limit.

    Elias, "Universal Codeword Sets and Representations of the Integers", IEEE Transactions on Information Theory 1975.

Start with the bit 0. While the number is above 1, prepend its binary digits, and continue with the number of these
digits minus 1. So 1 is ``0``, 2 is ``100``, 4 is ``101000``, 100 is ``1011011001000``. Codes form a stream of bits, the
first bit highest. Writing takes one vector operation for each of the at most five rounds of the largest number. Reading
needs to know where a code begins. So the caller passes many places of a stream, and one vector operation reads the next
code at each of them. It runs in NumPy on the host, which must know the length anyway.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from lightning_compress.codecs.packing.bits import Bytes, damaged

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
TABLE_BITS = 16
LARGEST = 1 << 40
"""Exclusive upper limit of the numbers: the codes of larger ones do not fit into a word."""


def omega(numbers: Ints) -> tuple[Words, Ints]:
    """Return the codes of numbers.

    Args:
        numbers: int64 of any shape, from 1 to 2^40 - 1.

    Returns:
        the bits of each code as a number (the first bit highest), and the number of its bits.
    """
    codes, lengths, rest = np.zeros(numbers.shape, np.uint64), np.ones(numbers.shape, np.int64), numbers
    while (more := rest > 1).any():
        codes |= np.where(more, rest << lengths, 0).astype(np.uint64)
        digits = np.frexp(rest.astype(np.float64))[1].astype(np.int64)
        lengths += np.where(more, digits, 0)
        rest = np.where(more, digits - 1, 1)
    return codes, lengths


def append(words: Words, start: int, codes: Words, lengths: Ints) -> int:
    """Write codes into a stream.

    Args:
        words: uint64, the words of the stream, 0 from bit ``start`` on; one word longer than needed.
        start: bit at which the first code begins.
        codes: bits of each code as a number, ``[n]``.
        lengths: bits of each code, 1 to 64.

    Returns:
        the bit after the last code.
    """
    if not len(codes):
        return start
    ends = np.cumsum(lengths)
    ends += start
    starts = ends - lengths
    first = starts >> 6
    over = (starts & 63) + lengths - 64  # bits that do not fit into the code's first word
    inside = np.left_shift(codes, np.maximum(-over, 0).astype(np.uint64))
    crossing = np.flatnonzero(over > 0)
    inside[crossing] >>= over[crossing].astype(np.uint64)
    runs = np.flatnonzero(np.diff(first, prepend=-1))
    words[first[runs]] |= np.bitwise_or.reduceat(inside, runs)
    words[first[crossing] + 1] |= codes[crossing] << (64 - over[crossing]).astype(np.uint64)
    return int(ends[-1])


def to_words(stream: Bytes) -> Words:
    """Return the words of a stream from its bytes, followed by zeros."""
    words = np.zeros(len(stream) // 8 + 3, ">u8")
    words.view(np.uint8)[: len(stream)] = stream
    return words.astype(np.uint64)


def to_bytes(words: Words, bits: int) -> Bytes:
    """Return the bytes of a stream of ``bits`` bits."""
    return words[: -(-bits // 64)].astype(">u8").view(np.uint8)[: -(-bits // 8)]


def window(words: Words, places: Ints) -> Words:
    """Return the 64 bits from each place of a stream on; bits after its end are arbitrary."""
    first = np.minimum(places >> 6, len(words) - 2)
    shift = (places & 63).astype(np.uint64)
    bits: Words = (words[first] << shift) | (words[first + 1] >> np.uint64(1) >> (np.uint64(63) - shift))
    return bits


def read(bits: Words) -> tuple[Ints, Ints]:
    """Return the number whose code each word begins with, and the length of the code.

    Raises:
        ValueError: a word does not begin with the code of a number below 2^40.
    """
    values, sizes = _table()
    top = (bits >> np.uint64(64 - TABLE_BITS)).astype(np.int64)
    numbers, lengths = values[top], sizes[top]
    long = np.flatnonzero(lengths == 0)
    if len(long):
        numbers[long], lengths[long] = _read_long(bits[long])
    return numbers, lengths


def _read_long(bits: Words) -> tuple[Ints, Ints]:
    numbers, lengths = np.ones(len(bits), np.int64), np.zeros(len(bits), np.int64)
    while (more := (bits << lengths.astype(np.uint64)) >> np.uint64(63) != 0).any():
        digits = np.where(more, numbers + 1, 0)
        if (digits > 40).any():
            raise damaged("it has an Elias code of a number above 2^40")
        value = (bits << lengths.astype(np.uint64)) >> np.uint64(1) >> (63 - digits).astype(np.uint64)
        numbers = np.where(more, value.astype(np.int64), numbers)
        lengths += digits
    return numbers, lengths + 1


@cache
def _table() -> tuple[Ints, Ints]:
    """Return number and length of the code at the start of each 16-bit value; length 0 if the code is longer."""
    values, sizes = np.ones(1 << TABLE_BITS, np.int64), np.zeros(1 << TABLE_BITS, np.int64)
    numbers = np.arange(1, 512)
    for number, code, length in zip(numbers, *omega(numbers), strict=True):
        first = int(code) << (TABLE_BITS - length)
        values[first : first + (1 << (TABLE_BITS - length))] = number
        sizes[first : first + (1 << (TABLE_BITS - length))] = length
    return values, sizes
