"""Law 9: ``decode`` of what no ``encode`` wrote, between guards."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from lightning_compress.testing.mutations import mutate
from lightning_compress.testing.vectors import CPU

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
