"""Law 9: ``decode``, between guards, of what no ``encode`` wrote; most of it nearly right, which tells more."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from lightning_compress.testing.vectors import CPU

Bytes = npt.NDArray[np.uint8]

FLOATS = np.array(
    [np.nan, np.inf, -np.inf, -1.0, 0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38, 1e-38, 2.0**-100], np.float32
)
WHOLE = np.array([0, 1, -1, 7, 255, 65535, 65536, 2**31 - 1, -(2**31), 2**24, 1 << 20], np.int64).astype(np.int32)
HALVES = np.array([0, 1, 15, 16, 255, 32767, 32768, 65535, 0x7C00, 0xFC00, 0x7E00], np.uint16)

GUARD = 64
CANARY = 5.0


class Reader(Protocol):
    """What reads messages of up to ``size`` bytes, into vectors of ``numel`` elements."""

    numel: int
    size: int
    variable: bool

    def encode(self, vector: Tensor, message: Tensor, key: int) -> int:
        """Write a message; returns the bytes of it that were used."""

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Read it; see ``Plan.decode``."""


class CodecReader:
    """One codec's messages."""

    def __init__(self, codec: Codec, layout: Layout) -> None:
        self.plan = codec.plan(layout, CPU)
        self.numel, self.size, self.variable = layout.numel, self.plan.message_size, self.plan.variable

    def encode(self, vector: Tensor, message: Tensor, key: int) -> int:
        """See ``Reader``."""
        self.plan.encode(vector, message, key)
        return self.plan.used

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Reader``."""
        self.plan.decode(messages, out, weight, accumulate)


class Guarded:
    """One reader, and a message that it must go on reading well.

    Args:
        plan: what reads.
        seed: of the good message's vector.
        unit: messages end at multiples of so many bytes.
    """

    def __init__(self, plan: Reader, seed: int, unit: int = 1) -> None:
        self.plan, self.unit = plan, unit
        vector = torch.randn(plan.numel, generator=torch.Generator().manual_seed(seed)).square_().sub_(0.5)
        self.good = torch.zeros(plan.size, dtype=torch.uint8)
        self.used = plan.encode(vector, self.good, 7)
        self.expected = torch.zeros(plan.numel)
        plan.decode(self.good[None, : self.used], self.expected, 1.0, False)
        self.arena = torch.empty(plan.numel + 2 * GUARD)
        self.out = self.arena[GUARD:-GUARD]

    def attempt(self, random: np.random.Generator) -> bool:
        """One input; whether it was refused.

        Raises:
            AssertionError: something outside ``out`` was changed, or a good message is not read well any more.
            Exception: any that is no ``ValueError``: the defect that is looked for.
        """
        rows, width = int(random.integers(1, 4)), self.plan.size
        if self.plan.variable:  # rows end anywhere, and may end too early
            width = (width, self.used, int(random.integers(0, width + 1)))[random.integers(3)]
            width -= width % self.unit
        wire = torch.zeros(rows + 2, 16 * math.ceil(width / 16) + 2 * GUARD, dtype=torch.uint8)
        messages = wire[1:-1, GUARD : GUARD + width]
        for row in messages.numpy():
            row[:] = self.good[:width].numpy()
            if random.random() < 0.8:
                mutate(row, random)
        before = wire.clone()
        self.arena.fill_(CANARY)
        refused = False
        with np.errstate(all="ignore"):  # numbers from garbage overflow
            try:
                self.plan.decode(messages, self.out, 1 / rows, bool(random.integers(2)))
            except ValueError as error:
                refused = bool(str(error))
        self.check(wire, before)
        return refused

    def check(self, wire: Tensor, before: Tensor) -> None:
        """Nothing else was touched, and a good message is read as ever."""
        assert torch.equal(wire, before), "the messages were changed"
        assert (self.arena[:GUARD] == CANARY).all(), "written before out"
        assert (self.arena[-GUARD:] == CANARY).all(), "written behind out"
        self.plan.decode(self.good[None, : self.used], self.out, 1.0, False)
        assert torch.equal(self.out, self.expected), "a good message is read otherwise afterwards"


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
