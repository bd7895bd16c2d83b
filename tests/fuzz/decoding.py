"""Decoding of what no ``encode`` wrote, between guards."""

import math
import zlib

import numpy as np
import torch

from lightning_compress.codecs import QSGD, Codec, OneBit, TopK
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges.message import MessagePlan, Section
from lightning_compress.testing.fuzz import CodecReader, Guarded
from tests.cases import CASES

CPU = torch.device("cpu")
LAYOUTS = [
    Layout.of([("one", (1,))]),
    Layout.of([("a", (5,)), ("b", (4,))]),
    Layout.of([("conv", (8, 3, 3, 3)), ("linear", (61, 37)), ("odd", (3, 131))]),
    Layout.of([("first", (70_000,)), ("second", (300, 7))]).cut(13, 71_500),  # beyond 16 bits, and parts of parameters
]


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
        flag = torch.zeros(())
        if messages.shape[1] >= 16:
            self.plan.head.read(messages, flag)
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
    return GroupPlan(GROUPS[name], layout) if name in GROUPS else CodecReader(METHODS[name], layout)


class Target(Guarded):
    """One plan, and a message that it must go on reading well."""

    def __init__(self, name, number):
        super().__init__(made(name, number), number, 16 if name in GROUPS else 1)

    def close(self):
        """Nothing is open."""


def randomness(seed, name, number, round):
    """What makes an input; the same four numbers make it again."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), number, round])
