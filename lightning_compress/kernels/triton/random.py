"""Random bits of a key's stream, a word for four neighbours; those of ``codecs/randomness.py``, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl

PER_WORD = tl.constexpr(4)
"""Elements that share a word."""
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


def signed(state: int) -> int:
    """An unsigned 64-bit state as kernels take it."""
    return (state + 2**63) % 2**64 - 2**63


@triton.jit
def words(start, number):
    """The words, uint64, of these numbers (int64) in the stream that begins with the state ``start`` (int64)."""
    word = start.to(tl.uint64) + number.to(tl.uint64) * _GAMMA
    word = (word ^ (word >> 30)) * _FIRST
    word = (word ^ (word >> 27)) * _SECOND
    return word ^ (word >> 31)


@triton.jit
def random_bits(start, first, WIDTH: tl.constexpr):
    """16 bits for each element of rows that begin with the elements ``first``, multiples of 4.

    Returns:
        float32 ``[len(first), WIDTH]``: whole numbers, -32768 to 32767.
    """
    number = first[:, None] // PER_WORD + tl.arange(0, WIDTH // PER_WORD)[None, :]
    shift = (tl.arange(0, PER_WORD) * 16).to(tl.uint64)
    bits = (words(start, number)[:, :, None] >> shift[None, None, :]).to(tl.uint16).to(tl.int16, bitcast=True)
    return tl.reshape(bits.to(tl.float32), [first.shape[0], WIDTH])
