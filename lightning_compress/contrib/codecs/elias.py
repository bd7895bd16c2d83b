"""Elias' omega code: whole numbers from 1 on, small ones in few bits, without knowing how large they get.

    Elias, "Universal Codeword Sets and Representations of the Integers", IEEE Transactions on Information Theory 1975.

Begin with a 0; while the number is above 1, put its binary digits in front, and go on with how many they were, less
one. 1 is ``0``, 2 is ``100``, 4 is ``101000``, 100 is ``1011011001000``. Codes stand in a stream of bits, the first one
highest. Writing takes a vector operation for each of the at most five rounds of the largest number. Reading must know
where a code begins, so the codes of a stream are read in lock-step in many places, which the caller knows: a vector
operation reads the next code of every place. It is NumPy on the host: a length must be known there anyhow.
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
"""Numbers from here on are refused: their codes do not fit a word."""


def omega(numbers: Ints) -> tuple[Words, Ints]:
    """Codes of numbers from 1 to 2^40 - 1.

    Args:
        numbers: int64 of any shape.

    Returns:
        The codes' bits as numbers (the first bit highest), and how many bits they have.
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
        words: uint64, the stream's words, 0 from the bit ``start`` on; one more than needed.
        start: where the first code begins.
        codes: bits as numbers, ``[n]``.
        lengths: of each code, 1 to 64.

    Returns:
        Where the last code ends.
    """
    if not len(codes):
        return start
    ends = np.cumsum(lengths)
    ends += start
    starts = ends - lengths
    first = starts >> 6
    over = (starts & 63) + lengths - 64  # bits that the code's first word has no room for
    inside = np.left_shift(codes, np.maximum(-over, 0).astype(np.uint64))
    crossing = np.flatnonzero(over > 0)
    inside[crossing] >>= over[crossing].astype(np.uint64)
    runs = np.flatnonzero(np.diff(first, prepend=-1))
    words[first[runs]] |= np.bitwise_or.reduceat(inside, runs)
    words[first[crossing] + 1] |= codes[crossing] << (64 - over[crossing]).astype(np.uint64)
    return int(ends[-1])


def to_words(stream: Bytes) -> Words:
    """A stream's words from its bytes, and 0 behind them."""
    words = np.zeros(len(stream) // 8 + 3, ">u8")
    words.view(np.uint8)[: len(stream)] = stream
    return words.astype(np.uint64)


def to_bytes(words: Words, bits: int) -> Bytes:
    """The bytes of a stream of so many bits."""
    return words[: -(-bits // 64)].astype(">u8").view(np.uint8)[: -(-bits // 8)]


def window(words: Words, places: Ints) -> Words:
    """The 64 bits that begin at each place of a stream; beyond its end, anything."""
    first = np.minimum(places >> 6, len(words) - 2)
    shift = (places & 63).astype(np.uint64)
    bits: Words = (words[first] << shift) | (words[first + 1] >> np.uint64(1) >> (np.uint64(63) - shift))
    return bits


def read(bits: Words) -> tuple[Ints, Ints]:
    """The number whose code each of these words begins with, and the code's length.

    Raises:
        ValueError: one of them begins with no code of a number below 2^40.
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
    """Number and length of the code that each 16 bits begin with; length 0 where it is longer."""
    values, sizes = np.ones(1 << TABLE_BITS, np.int64), np.zeros(1 << TABLE_BITS, np.int64)
    numbers = np.arange(1, 512)
    for number, code, length in zip(numbers, *omega(numbers), strict=True):
        first = int(code) << (TABLE_BITS - length)
        values[first : first + (1 << (TABLE_BITS - length))] = number
        sizes[first : first + (1 << (TABLE_BITS - length))] = length
    return values, sizes
