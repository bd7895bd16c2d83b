"""Decoding of what no ``encode`` wrote, between guards."""

import math
import zlib

import numpy as np
import torch

from lightning_compress.codecs import QSGD, Codec, OneBit, TopK
from lightning_compress.core.layout import Layout
from lightning_compress.core.meter import Meter
from lightning_compress.exchanges.message import MessagePlan, Section
from tests.cases import CASES
from tests.fuzz.mutations import mutate

CPU = torch.device("cpu")
GUARD = 64
CANARY = 5.0
LAYOUTS = [
    Layout.of([("one", (1,))]),
    Layout.of([("a", (5,)), ("b", (4,))]),
    Layout.of([("conv", (8, 3, 3, 3)), ("linear", (61, 37)), ("odd", (3, 131))]),
    Layout.of([("first", (70_000,)), ("second", (300, 7))]).cut(13, 71_500),  # beyond 16 bits, and parts of parameters
]


class CodecPlan:
    """One codec's messages."""

    def __init__(self, codec, layout):
        self.plan = codec.plan(layout, CPU)
        self.numel, self.size, self.variable = layout.numel, self.plan.message_size, self.plan.variable

    def encode(self, vector, message, key):
        self.plan.encode(vector, message, key)
        return self.plan.used

    def decode(self, messages, out, weight, accumulate):
        self.plan.decode(messages, out, weight, accumulate)


class GroupPlan:
    """Messages of several sections, of which some vary in length."""

    def __init__(self, codecs, layout):
        sections, start = [], 0
        for codec in codecs:
            sections.append(Section(codec, layout, start))
            start += layout.numel
        self.plan = MessagePlan(sections, CPU, Meter(CPU))
        self.numel, self.size, self.variable = start, self.plan.size, self.plan.variable

    def encode(self, vector, message, key):
        return self.plan.encode(vector, message, key, torch.zeros(()))

    def decode(self, messages, out, weight, accumulate):
        flag = self.plan.flags(messages) if messages.shape[1] >= 16 else torch.zeros(())
        assert float(flag) == 0.0 or math.isnan(flag)
        self.plan.decode(messages, out, weight, accumulate)


METHODS = {case.name: case.codec for case in CASES if isinstance(case.codec, Codec)}
METHODS |= {f"{case.name}_whole": case.lossless for case in CASES if case.name in METHODS and case.lossless}
GROUPS = {
    "message": [OneBit(block=64), TopK(0.05)],
    "message_variable": [TopK(0.05, indices="rice"), QSGD(3, 64, "l2", "elias"), OneBit(block=64), TopK(0.05)],
}
NAMES = [*METHODS, *GROUPS]


def made(name, number):
    """A plan by its name, for one of the layouts."""
    layout = LAYOUTS[number]
    return GroupPlan(GROUPS[name], layout) if name in GROUPS else CodecPlan(METHODS[name], layout)


class Target:
    """One plan, and a message that it must go on reading well."""

    def __init__(self, name, number):
        self.plan, self.name, self.number = made(name, number), name, number
        vector = torch.randn(self.plan.numel, generator=torch.Generator().manual_seed(number)).square_().sub_(0.5)
        self.good = torch.zeros(self.plan.size, dtype=torch.uint8)
        self.used = self.plan.encode(vector, self.good, 7)
        self.expected = torch.zeros(self.plan.numel)
        self.plan.decode(self.good[None, : self.used], self.expected, 1.0, False)
        self.arena = torch.empty(self.plan.numel + 2 * GUARD)
        self.out = self.arena[GUARD:-GUARD]

    def attempt(self, random):
        """One input; whether it was refused.

        Raises:
            AssertionError: something outside ``out`` was changed, or a good message is not read well any more.
            Exception: any that is no ``ValueError``: the defect that is looked for.
        """
        rows, width = int(random.integers(1, 4)), self.plan.size
        if self.plan.variable:  # rows end anywhere, and may end too early
            width = int(random.choice([width, self.used, random.integers(0, width + 1)]))
            width -= width % 16 if self.name in GROUPS else 0
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

    def close(self):
        """Nothing is open."""

    def check(self, wire, before):
        """Nothing else was touched, and a good message is read as ever."""
        assert torch.equal(wire, before), "the messages were changed"
        assert (self.arena[:GUARD] == CANARY).all(), "written before out"
        assert (self.arena[-GUARD:] == CANARY).all(), "written behind out"
        self.plan.decode(self.good[None, : self.used], self.out, 1.0, False)
        assert torch.equal(self.out, self.expected), "a good message is read otherwise afterwards"


def randomness(seed, name, number, round):
    """What makes an input; the same four numbers make it again."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), number, round])
