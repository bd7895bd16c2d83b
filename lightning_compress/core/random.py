"""Keys and the random bits that follow from them, counter-based, so that there is no generator state to save.

Word ``i`` of a key's stream holds 16 bits for each of the elements ``4 i`` to ``4 i + 3``, the lowest bits first. It is
splitmix64's output function (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) of
``mix(key) + i * GAMMA``. This is integer arithmetic without state, so any part of the stream can be computed alone.
Keys are hashed first. Otherwise the streams of neighbouring keys would be shifted copies of one another.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress.core.workspace import pieces, scratch
from lightning_compress.kernels.program import Varying, fixed, varying

_MASK = (1 << 64) - 1


def mix(*parts: int, key: int = 0) -> int:
    """Hash integers into an unsigned 64-bit key (splitmix64, Steele et al., OOPSLA 2014).

    Args:
        *parts: what is hashed.
        key: of the parts before these: ``mix(a, b) == mix(b, key=mix(a))``.
    """
    if Varying in map(type, (key, *parts)):
        return varying(_mix, key, *parts)
    for part in parts:
        key = (key + part + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def _mix(key: int, *parts: int) -> int:
    return mix(*parts, key=key)


def name_key(names: tuple[str, ...]) -> int:
    """Return the key of an ordered list of parameter names, the same in every process."""
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8], "little")


def permutation(key: int, count: int) -> list[int]:
    """Return the integers below ``count`` in an order that follows from the key."""
    key = fixed(key) if type(key) is Varying else key
    return sorted(range(count), key=lambda number: mix(key, number))


class Stream(NamedTuple):
    """A key's random bits, with an offset added to each 16 of them, modulo 2^16.

    Attributes:
        key: unsigned 64-bit integer.
        offset: -32768 to 32767.
    """

    key: int
    offset: int = 0

    @classmethod
    def shared(cls, key: int, place: int, places: int) -> Stream:
        """Return stream ``place`` of ``places`` streams with the same key and evenly spread offsets."""
        return cls(key, (place * 2**16 // places + 2**15) % 2**16 - 2**15)


PER_WORD = 4
"""Elements that share a 64-bit word."""
GAMMA = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
RUN = 1 << 13
"""Words that are hashed at a time on a CPU: two buffers of them fit the innermost cache."""


class RandomBits:
    """Draw up to ``numel`` elements' worth of random bits into scratch memory.

    Args:
        numel: elements per draw, at most.
        device: of the bits.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self._words = scratch("random words", -(-numel // PER_WORD), torch.int64, device)

    def draw(self, key: int, first: int, numel: int, offset: int = 0) -> Tensor:
        """Draw 16 random bits for each of the elements ``first`` to ``first + numel - 1`` of a key's stream.

        Args:
            key: unsigned 64-bit integer; different keys give independent streams.
            first: a multiple of 4.
            numel: number of elements.
            offset: see ``Stream``.

        Returns:
            int16 ``[numel]``, uniform over -32768 to 32767; scratch memory that the next draw overwrites.
        """
        words = self._words[: -(-numel // PER_WORD)]
        start = word_state(fixed(key) if type(key) is Varying else key, first)
        (_hash_numpy if words.device.type == "cpu" else hash_torch)(words, start)
        bits = words.view(torch.int16)[:numel]
        return bits.add_(offset) if offset else bits  # int16 wraps around


PLACE_BITS = 31
"""Bits of the random integers that ``draw_places`` scales to indices."""


def draw_places(random: RandomBits, key: int, starts: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
    """Draw one index from each range, uniformly.

    Args:
        random: for ``PER_WORD`` elements per range.
        key: see ``RandomBits.draw``.
        starts: int64 ``[n]``, the first index of each range.
        lengths: int64 ``[n]``, below 2^31.
        out: int64 ``[n]``, overwritten and returned.
    """
    words = random.draw(key, 0, PER_WORD * len(out)).view(torch.int64)
    torch.bitwise_right_shift(words, 64 - PLACE_BITS, out=out).bitwise_and_(2**PLACE_BITS - 1)
    return out.mul_(lengths).bitwise_right_shift_(PLACE_BITS).add_(starts)


def word_state(key: int, first: int) -> int:
    """Return the state before the word of element ``first`` in a key's stream, modulo 2^64.

    Args:
        key: see ``RandomBits.draw``.
        first: a multiple of 4.
    """
    return (mix(key) + first // PER_WORD * GAMMA) % 2**64


def _hash_numpy(words: Tensor, start: int) -> None:
    array, steps = words.numpy().view(np.uint64), _steps()
    shifted = np.empty(min(len(array), RUN), np.uint64)
    for piece in pieces(len(array), RUN):
        state = array[piece]
        other = shifted[: len(state)]
        np.add(steps[: len(state)], np.uint64((start + piece.start * GAMMA) % 2**64), out=state)
        for shift, factor in zip(SHIFTS, FACTORS, strict=False):
            np.bitwise_xor(state, np.right_shift(state, np.uint64(shift), out=other), out=state)
            np.multiply(state, np.uint64(factor), out=state)
        np.bitwise_xor(state, np.right_shift(state, np.uint64(SHIFTS[-1]), out=other), out=state)


def hash_torch(words: Tensor, start: int) -> None:
    """Compute the same words with torch, for accelerators.

    int64 wraps as uint64 does, but shifts need their upper bits cleared.

    Args:
        words: int64 ``[n]``, overwritten.
        start: the state before the first word, taken modulo 2^64.
    """
    torch.arange(len(words), out=words)
    words.mul_(_signed(GAMMA)).add_(_signed(start))
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        words.bitwise_xor_((words >> shift) & (2 ** (64 - shift) - 1)).mul_(_signed(factor))
    words.bitwise_xor_((words >> SHIFTS[-1]) & (2 ** (64 - SHIFTS[-1]) - 1))


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@cache
def _steps() -> npt.NDArray[np.uint64]:
    """Return the distance of each word of a run from the run's first word."""
    return np.arange(RUN, dtype=np.uint64) * np.uint64(GAMMA)
