"""The law suite for methods from outside: ours pass it, and each way of breaking a law is named."""

import itertools
import math
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from lightning_compress.codecs import Codec, Dense, Plan, TopK
from lightning_compress.reducers import Reducer, ReducerPlan
from lightning_compress.testing import check_codec
from tests.cases import CASES

OF_EACH_KIND = {"none", "bf16", "topk", "threshold", "onebit", "qsgd", "fft", "randomk", "powersgd"}


@pytest.mark.parametrize(
    "case",
    [  # one of each kind; the others are held to the same functions by test_laws.py
        pytest.param(case, id=case.name, marks=() if case.name in OF_EACH_KIND else pytest.mark.thorough)
        for case in CASES
    ],
)
def test_ours_pass(case):
    check_codec(case.codec, ranks=(3,), lossless=case.lossless, rounding=case.rounding)


class BytesPlan(Plan):
    """Whole steps of the largest element's 127th part, a byte each."""

    def __init__(self, layout, codec):
        super().__init__(layout)
        self.codec, self.message_size = codec, 16 + layout.numel

    def codes(self, vector, scale, key):
        return (vector / scale).nan_to_num_().round_().clamp_(-127, 127)

    def encode(self, vector, message, key):
        scale = vector.abs().amax() / 127
        codes = self.codes(vector, scale, key)
        message[:16].view(torch.float32)[:] = scale
        message[16:].view(torch.int8).copy_(codes)
        vector -= codes * scale

    def decode(self, messages, out, weight, accumulate):
        if not accumulate:
            out.zero_()
        for message in messages:
            out.add_(message[16:].view(torch.int8) * message[:4].view(torch.float32), alpha=weight)


@dataclass(frozen=True)
class Bytes(Codec):
    contractive: ClassVar[bool] = True
    made: ClassVar[type] = BytesPlan

    def plan(self, layout, device, summands=1):
        return self.made(layout, self)


def broken(plan=None, **flags):
    """``Bytes`` with other methods of its plan, or other flags."""
    made = type("Broken", (BytesPlan,), plan or {})
    return type("Broken", (Bytes,), {"made": made, **flags})()


def forgets(self, vector, message, key):
    BytesPlan.encode(self, vector, message, key)
    vector.zero_()


def skips_bytes(self, vector, message, key):
    before = message[4:16].clone()
    BytesPlan.encode(self, vector, message, key)
    message[4:16] = before


def doubles(self, vector, message, key):
    before = vector.clone()
    BytesPlan.encode(self, vector, message, key)
    message[:16].view(torch.float32).mul_(3)
    vector.add_((before - vector), alpha=-2)


counter = itertools.count(1)


def differs(self, messages, out, weight, accumulate):
    BytesPlan.decode(self, messages, out, weight, accumulate)
    if len(messages) > 1:
        out *= 1 + 1e-6 * (next(counter) % 7)


def adds_wrongly(self, messages, out, weight, accumulate):
    BytesPlan.decode(self, messages[:1], out, weight, accumulate)


def at_random(self, vector, scale, key, own=True):
    generator = torch.Generator().manual_seed(key % 2**62 if own else 5)
    return ((vector / scale).nan_to_num_() + torch.rand(len(vector), generator=generator)).floor_().clamp_(-127, 127)


def alike(self, vector, scale, key):
    return at_random(self, vector, scale, key, own=False)


def remembers(self, key):
    self.common = key


def in_common(self, vector, scale, key):
    return at_random(self, vector, scale, self.common)


COMMON = broken({"share": remembers, "codes": in_common, "common": 1}, contractive=False)


def test_a_codec_of_a_few_lines_passes():
    check_codec(Bytes(), size=lambda layout: 16 + layout.numel)
    check_codec(broken({"codes": at_random}, contractive=False))


@pytest.mark.parametrize(
    ("codec", "arguments", "words"),
    [
        (broken({"encode": forgets}), {}, "law 1 (conservation): "),
        (Bytes(), {"size": lambda layout: 8 + layout.numel}, "law 2 (size): "),
        (broken({"encode": skips_bytes}), {}, "unwritten bytes"),
        (broken({"send": skips_bytes}), {}, "send writes another message"),
        (Bytes(), {"lossless": Bytes()}, "law 3 (identity): "),
        (broken({"decode": differs}), {}, "law 4 (one truth): "),
        (broken({"decode": adds_wrongly}), {}, "three messages decoded at once are off their sum"),
        (broken({"encode": doubles}), {}, "is declared contractive, and leaves a norm of"),
        (broken(contractive=False), {}, "not declared contractive, but the mean over 32 keys is off"),
        (broken({"codes": alike}, contractive=False), {}, "law 8 (faithful): "),
        (COMMON, {}, "draw from the key that encode is given"),
        (Bytes(), {"reference": lambda vector: vector}, "is off its reference"),
    ],
)
def test_a_broken_law_is_named(codec, arguments, words):
    with pytest.raises(AssertionError, match=re.escape(words)):
        check_codec(codec, **arguments)


class SumPlan(ReducerPlan):
    rounds = 1

    def __init__(self, layout, carried, world, fault):
        self.world, self.fault = world, fault
        size = world.collective.size
        self.bytes_sent = math.floor(2 * (size - 1) / size * 4 * (layout.numel + carried))

    def mean(self, vector, out, carried, key):
        whole = torch.cat([vector, carried])
        self.world.collective.all_reduce(whole)
        out.copy_(whole[: len(vector)]).div_(self.world.collective.size)
        own = carried[0].clone()
        carried.copy_(whole[len(vector) :])
        if self.fault == "flag":
            carried[0] = own
        if self.fault == "rank":
            out += 1e-6 * self.world.collective.rank
        if self.fault != "mass":
            vector.zero_()


@dataclass(frozen=True)
class Sum(Reducer):
    fault: str = ""

    def plan(self, layout, carried, world, states):
        return SumPlan(layout, carried, world, self.fault)


def test_a_reducer_of_a_few_lines_passes():
    check_codec(Sum(), lossless=Sum(), ranks=(2, 4))


@pytest.mark.parametrize(
    ("fault", "words"), [("flag", "law 7 (bad numbers pass): "), ("rank", "law 4 ("), ("mass", "law 1 (")]
)
def test_a_broken_reducer_is_named(fault, words):
    with pytest.raises(AssertionError, match=re.escape(words)):
        check_codec(Sum(fault))


def test_exchanges_and_ranks_are_chosen_by_the_caller():
    from lightning_compress.exchanges import Butterfly

    check_codec(TopK(0.05), exchanges={"butterfly": Butterfly()}, ranks=(4,))
    check_codec(Dense(), ranks=(1,), lossless=Dense())
