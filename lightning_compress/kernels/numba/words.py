"""Bits of words of 32; the compiler knows these sums, and makes one instruction of each."""

from __future__ import annotations

from typing import Any

from numpy import uint32

from lightning_compress.kernels.numba import kernel

# Each result is an uint32 again, since numba would go on with 64 bits, and the instruction would not be found.


@kernel
def ones(word: Any) -> Any:
    """How many bits of a word are 1."""
    word = uint32(word - uint32((word >> uint32(1)) & uint32(0x55555555)))
    word = uint32(uint32(word & uint32(0x33333333)) + uint32((word >> uint32(2)) & uint32(0x33333333)))
    word = uint32(uint32(word + uint32(word >> uint32(4))) & uint32(0x0F0F0F0F))
    return uint32(uint32(word * uint32(0x01010101)) >> uint32(24))


@kernel
def lowest(word: Any) -> Any:
    """The index of the lowest bit of a word that is not 0."""
    return ones(uint32(uint32(~word) & uint32(word - uint32(1))))


@kernel
def without_lowest(word: Any) -> Any:
    """The word with its lowest bit cleared."""
    return uint32(word & uint32(word - uint32(1)))
