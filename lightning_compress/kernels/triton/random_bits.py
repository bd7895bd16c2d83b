"""Random bits of a key's stream, one word for four elements. Bit-identical to ``core/random.py``."""

from __future__ import annotations

import triton
import triton.language as tl

PER_WORD = tl.constexpr(4)
"""Elements that share a word."""
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


def signed(state: int) -> int:
    """Return an unsigned 64-bit state as a signed integer, as kernels need it."""
    return (state + 2**63) % 2**64 - 2**63


@triton.jit
def hash_words(state):
    """Return the random words, uint64, of states. Consecutive states differ by ``_GAMMA``."""
    word = (state ^ (state >> 30)) * _FIRST
    word = (word ^ (word >> 27)) * _SECOND
    return word ^ (word >> 31)


@triton.jit
def mixed(key, part):
    """Return a key, uint64, after one more part (int64) was mixed in; see ``core/random.mix``."""
    return hash_words(key + part.to(tl.uint64) + _GAMMA)


@triton.jit
def shard_state(key, peer, section):
    """Return the state, int64, of the random words of a peer's section, from the key (int64) without both."""
    own = mixed(key.to(tl.uint64), peer)
    if section != 0:
        own = mixed(mixed(tl.zeros([], tl.uint64), own), -section)
    return mixed(tl.zeros([], tl.uint64), own).to(tl.int64)


@triton.jit
def moved(bits, move):
    """Return 16 random bits each, int32, plus ``move``, int32 or None, modulo 2^16: int16."""
    if move is not None:
        bits = (bits & 0xFFFF) + move
    return bits.to(tl.int16)


@triton.jit
def random_bits(start, first, move, WIDTH: tl.constexpr):
    """Return 16 random bits for each element of rows.

    Args:
        start: int64, the state before the stream's first word.
        first: int64 ``[ROWS]``, index of each row's first element; multiples of 4.
        move: added to the bits, int32 or None; see ``moved``.
        WIDTH: elements of a row.

    Returns:
        float32 ``[ROWS, WIDTH]``, integers from -32768 to 32767.
    """
    row = start.to(tl.uint64) + (first >> 2).to(tl.uint64) * _GAMMA
    column = tl.arange(0, WIDTH // 4).to(tl.uint64) * _GAMMA
    shift = (tl.arange(0, 4) * 16).to(tl.uint64)
    bits = hash_words(row[:, None] + column[None, :])[:, :, None] >> shift[None, None, :]
    numbers = bits.to(tl.uint16).to(tl.int16, bitcast=True)
    if move is not None:
        numbers = moved(numbers.to(tl.int32), move)
    return tl.reshape(numbers.to(tl.float32), [first.shape[0], WIDTH])


@triton.jit
def words(start, number):
    """Return the words, uint64, with these indices (int64) in the stream that starts with state ``start`` (int64)."""
    return hash_words(start.to(tl.uint64) + number.to(tl.uint64) * _GAMMA)


@triton.jit
def random16(start, number):
    """Return 16 bits for each of the four elements of the words with these indices: int32 ``[..., 4]``, 0 to 65535."""
    shift = (tl.arange(0, PER_WORD) * 16).to(tl.uint64)
    return (tl.expand_dims(words(start, number), len(number.shape)) >> shift).to(tl.int32) & 0xFFFF
