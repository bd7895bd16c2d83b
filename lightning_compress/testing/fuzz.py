"""Law 9: decode bytes that no ``encode`` wrote, between guards.

Most inputs are nearly valid, because these find more defects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """Decodes messages of up to ``size`` bytes into vectors of ``numel`` elements."""

    numel: int
    size: int
    variable: bool

    def encode(self, vector: Tensor, message: Tensor, key: int) -> int:
        """Write a message, and return how many bytes of it were used."""

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Decode messages; see ``Plan.decode``."""


class CodecReader:
    """Reads the messages of one codec."""

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
    """A reader, and a valid message that it must still decode after each invalid one.

    Args:
        plan: the reader.
        seed: of the vector in the valid message.
        unit: messages end at multiples of this many bytes.
    """

    def __init__(self, plan: Reader, seed: int, unit: int = 1) -> None:
        self.plan, self.unit = plan, unit
        draw = torch.Generator().manual_seed(seed)
        vector = torch.randn(plan.numel, dtype=torch.float32, generator=draw).square_().sub_(0.5)
        self.good = torch.zeros(plan.size, dtype=torch.uint8)
        self.used = plan.encode(vector, self.good, 7)
        self.expected = torch.zeros(plan.numel, dtype=torch.float32)
        plan.decode(self.good[None, : self.used], self.expected, 1.0, False)
        self.arena = torch.empty(plan.numel + 2 * GUARD, dtype=torch.float32)
        self.out = self.arena[GUARD:-GUARD]

    def attempt(self, random: np.random.Generator) -> bool:
        """Decode one mutated input, and return whether it raised ValueError.

        Raises:
            AssertionError: memory outside of ``out`` was changed, or the valid message is decoded differently
                afterwards.
            Exception: any other error than ``ValueError``: the defect that this looks for.
        """
        rows, width = int(random.integers(1, 4)), self.plan.size
        if self.plan.variable:  # rows end anywhere, also too early
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
        with np.errstate(all="ignore"):  # invalid values may overflow
            try:
                self.plan.decode(messages, self.out, 1 / rows, bool(random.integers(2)))
            except ValueError as error:
                refused = bool(str(error))
        self.check(wire, before)
        return refused

    def check(self, wire: Tensor, before: Tensor) -> None:
        """Check that nothing else was written, and that the valid message is decoded as before."""
        assert torch.equal(wire, before), "the messages were changed"
        assert (self.arena[:GUARD] == CANARY).all(), "written before out"
        assert (self.arena[-GUARD:] == CANARY).all(), "written behind out"
        self.plan.decode(self.good[None, : self.used], self.out, 1.0, False)
        assert torch.equal(self.out, self.expected), "a valid message is decoded differently afterwards"


def randomize(data: Bytes, random: np.random.Generator) -> None:
    """Replace all bytes."""
    data[:] = random.integers(0, 256, len(data), np.uint8)


def clear(data: Bytes, random: np.random.Generator) -> None:
    """Set all bits to 0; a unary code then never ends."""
    data[:] = 0x00


def fill(data: Bytes, random: np.random.Generator) -> None:
    """Set all bits to 1; an Elias code then never ends."""
    data[:] = 0xFF


def flip(data: Bytes, random: np.random.Generator) -> None:
    """Flip a few bits."""
    for place in random.integers(0, len(data), random.integers(1, 9)):
        data[place] ^= 1 << random.integers(8)


def replace(data: Bytes, random: np.random.Generator) -> None:
    """Replace a few bytes."""
    places = random.integers(0, len(data), random.integers(1, 9))
    data[places] = random.integers(0, 256, len(places), np.uint8)


def tail(data: Bytes, random: np.random.Generator) -> None:
    """Set all bits from some byte on to the same value."""
    data[random.integers(len(data)) :] = random.choice([0x00, 0xFF])


def head(data: Bytes, random: np.random.Generator) -> None:
    """Replace the first bytes, which hold lengths, counts, scales and norms."""
    first = data[: random.integers(1, 65)]
    first[:] = random.integers(0, 256, len(first), np.uint8)


def _inserting(values: npt.NDArray[Any]) -> Callable[[Bytes, np.random.Generator], None]:
    """Return a mutation that writes a few of these values, often near the beginning."""

    def insert(data: Bytes, random: np.random.Generator) -> None:
        words = data[: len(data) // values.itemsize * values.itemsize].view(values.dtype)
        if len(words):
            near = max(1, min(len(words), int(random.choice([8, 64, len(words)]))))
            count = random.integers(1, 9)
            words[random.integers(0, near, count)] = random.choice(values, count)

    return insert


floats = _inserting(FLOATS)
"""Insert scales that are not finite, negative, or denormal."""
ints = _inserting(WHOLE)
"""Insert 32-bit counts, lengths and indices that are out of range."""
halves = _inserting(HALVES)
"""Insert 16-bit counts, lengths and indices that are out of range."""


def duplicate(data: Bytes, random: np.random.Generator) -> None:
    """Copy a stretch to another place, so that indices do not ascend."""
    width = int(random.integers(1, max(2, len(data) // 2)))
    source, target = random.integers(0, len(data) - width + 1, 2)
    data[target : target + width] = data[source : source + width].copy()


def reverse(data: Bytes, random: np.random.Generator) -> None:
    """Reverse a stretch of 32-bit words."""
    words = data[: len(data) // 4 * 4].view(np.uint32)
    if len(words):
        first, last = np.sort(random.integers(0, len(words) + 1, 2))
        words[first:last] = words[first:last][::-1].copy()


def shift(data: Bytes, random: np.random.Generator) -> None:
    """Rotate all bytes by a few places."""
    data[:] = np.roll(data, random.integers(1, 9))


MUTATIONS = (randomize, clear, fill, flip, replace, tail, head, floats, ints, halves, duplicate, reverse, shift)


def mutate(data: Bytes, random: np.random.Generator) -> None:
    """Apply one or several random mutations to uint8 ``[n]`` in place."""
    for _ in range(random.choice([1, 1, 2, 4])) if len(data) else ():
        MUTATIONS[random.integers(len(MUTATIONS))](data, random)
