"""Bit operations on 32-bit words. The compiler turns each into one instruction."""

from __future__ import annotations

from typing import Any

from numpy import uint32

from lightning_compress.kernels.numba import kernel

# Results are cast to uint32, because numba would continue with 64 bits, and the compiler would miss the pattern.


@kernel
def ones(word: Any) -> Any:
    """Return the number of bits that are 1."""
    word = uint32(word - uint32((word >> uint32(1)) & uint32(0x55555555)))
    word = uint32(uint32(word & uint32(0x33333333)) + uint32((word >> uint32(2)) & uint32(0x33333333)))
    word = uint32(uint32(word + uint32(word >> uint32(4))) & uint32(0x0F0F0F0F))
    return uint32(uint32(word * uint32(0x01010101)) >> uint32(24))


@kernel
def lowest(word: Any) -> Any:
    """Return the index of the lowest bit that is 1."""
    return ones(uint32(uint32(~word) & uint32(word - uint32(1))))


@kernel
def without_lowest(word: Any) -> Any:
    """Return the word with its lowest 1 bit cleared."""
    return uint32(word & uint32(word - uint32(1)))
