"""Bytes that no ``encode`` wrote, most of them nearly right: what is refused at once tells little."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

FLOATS = np.array(
    [np.nan, np.inf, -np.inf, -1.0, 0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38, 1e-38, 2.0**-100], np.float32
)
WHOLE = np.array([0, 1, -1, 7, 255, 65535, 65536, 2**31 - 1, -(2**31), 2**24, 1 << 20], np.int64).astype(np.int32)
HALVES = np.array([0, 1, 15, 16, 255, 32767, 32768, 65535, 0x7C00, 0xFC00, 0x7E00], np.uint16)


def noise(data: Bytes, random: np.random.Generator) -> None:
    """All of it."""
    data[:] = random.integers(0, 256, len(data), np.uint8)


def zeros(data: Bytes, random: np.random.Generator) -> None:
    """All bits 0; a unary code then never ends."""
    data[:] = 0x00


def ones(data: Bytes, random: np.random.Generator) -> None:
    """All bits 1; an Elias code then never ends."""
    data[:] = 0xFF


def flips(data: Bytes, random: np.random.Generator) -> None:
    """A few bits."""
    for place in random.integers(0, len(data), random.integers(1, 9)):
        data[place] ^= 1 << random.integers(8)


def few(data: Bytes, random: np.random.Generator) -> None:
    """A few bytes."""
    places = random.integers(0, len(data), random.integers(1, 9))
    data[places] = random.integers(0, 256, len(places), np.uint8)


def endless(data: Bytes, random: np.random.Generator) -> None:
    """The same bit from somewhere on."""
    data[random.integers(len(data)) :] = random.choice([0x00, 0xFF])


def head(data: Bytes, random: np.random.Generator) -> None:
    """The first bytes, where lengths, counts, scales and norms are."""
    first = data[: random.integers(1, 65)]
    first[:] = random.integers(0, 256, len(first), np.uint8)


def _words(data: Bytes, random: np.random.Generator, values: npt.NDArray[Any]) -> None:
    size = values.dtype.itemsize
    words = data[: len(data) // size * size].view(values.dtype)
    if len(words):
        near = max(1, min(len(words), int(random.choice([8, 64, len(words)]))))
        count = random.integers(1, 9)
        words[random.integers(0, near, count)] = random.choice(values, count)


def floats(data: Bytes, random: np.random.Generator) -> None:
    """Scales that are not finite, negative, or denormal."""
    _words(data, random, FLOATS)


def whole(data: Bytes, random: np.random.Generator) -> None:
    """Counts, lengths and indices out of range."""
    _words(data, random, WHOLE)


def halves(data: Bytes, random: np.random.Generator) -> None:
    """The same in 16 bits."""
    _words(data, random, HALVES)


def doubled(data: Bytes, random: np.random.Generator) -> None:
    """A stretch twice: indices that do not ascend."""
    width = int(random.integers(1, max(2, len(data) // 2)))
    source, target = random.integers(0, len(data) - width + 1, 2)
    data[target : target + width] = data[source : source + width].copy()


def backwards(data: Bytes, random: np.random.Generator) -> None:
    """A stretch of words in reverse."""
    words = data[: len(data) // 4 * 4].view(np.uint32)
    if len(words):
        first, last = np.sort(random.integers(0, len(words) + 1, 2))
        words[first:last] = words[first:last][::-1].copy()


def shifted(data: Bytes, random: np.random.Generator) -> None:
    """Everything some bytes later."""
    data[:] = np.roll(data, random.integers(1, 9))


KINDS = (noise, zeros, ones, flips, few, endless, head, floats, whole, halves, doubled, backwards, shifted)


def mutate(data: Bytes, random: np.random.Generator) -> None:
    """Spoil uint8 ``[n]`` in place, once or several times."""
    for _ in range(random.choice([1, 1, 2, 4])) if len(data) else ():
        KINDS[random.integers(len(KINDS))](data, random)
