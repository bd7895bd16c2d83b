"""The law suite for methods from outside: ours pass it, and each way of breaking a law is named."""

import itertools
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from lightning_compress.codecs import Codec, Dense, Plan, TopK
from lightning_compress.codecs.codec import SourcePlan
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

    levels = 127
    factor = 1.0

    def __init__(self, layout, codec):
        super().__init__(layout)
        self.codec, self.message_size = codec, 16 + layout.numel

    def codes(self, vector, scale, key):
        return (vector / scale).nan_to_num_().round_().clamp_(-127, 127)

    def encode(self, vector, message, key):
        scale = vector.abs().amax() / self.levels
        codes = self.codes(vector, scale, key)
        scale = scale * self.factor
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
    return type("Broken", (Bytes,), {"made": made} | flags)()


def forgets(self, vector, message, key):
    BytesPlan.encode(self, vector, message, key)
    vector.zero_()


def skips_bytes(self, vector, message, key):
    before = message[4:16].clone()
    BytesPlan.encode(self, vector, message, key)
    message[4:16] = before


def skips_bytes_unkept(self, source, rest, message, key):
    vector, keep = source.into(rest), rest is not None
    self.check(vector, message)
    (BytesPlan.encode if keep else skips_bytes)(self, vector, message, key)


FUSED = type("Fused", (SourcePlan, BytesPlan), {"encode_from": skips_bytes_unkept})


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


def without(place):
    """Never sends the elements at a place that follows from their number."""

    def encode(self, vector, message, key):
        part = vector[place(len(vector))]
        rest = part.clone()
        part.zero_()
        BytesPlan.encode(self, vector, message, key)
        part += rest

    return encode


without_half = without(lambda numel: slice(numel // 2, None))
without_tail = without(lambda numel: slice(numel // 32 * 32, None))
without_fourths = without(lambda numel: slice(3, None, 4))


def without_small(self, vector, message, key):
    small = vector.abs() < 0.3 * vector.square().mean().sqrt()
    rest = vector * small
    vector[small] = 0.0
    BytesPlan.encode(self, vector, message, key)
    vector += rest


def called(self, most):
    """Whether there were more calls than that."""
    self.calls = getattr(self, "calls", 0) + 1
    return self.calls > most


def coarser_later(self, vector, message, key):
    self.levels = 3 if called(self, 10) else 127
    BytesPlan.encode(self, vector, message, key)


def smaller_later(self, messages, out, weight, accumulate):
    BytesPlan.decode(self, messages, out, weight * 0.99 if called(self, 4) else weight, accumulate)


def centred(self, vector, message, key):
    message[8:12].view(torch.float32)[:] = middle = vector.mean()
    vector -= middle
    kept = message[8:12].clone()
    BytesPlan.encode(self, vector, message, key)
    message[8:12] = kept


def with_middle(self, messages, out, weight, accumulate):
    BytesPlan.decode(self, messages, out, weight, accumulate)
    for message in messages:
        out.add_(message[8:12].view(torch.float32), alpha=weight)


def largest(self, vector, message, key):
    message[:16].view(torch.float32)[:] = vector.abs().amax()
    codes = self.codes(vector, vector.abs().amax() / 127, key)
    message[16:].view(torch.int8).copy_(codes)
    vector -= codes * (vector.abs().amax() / 127)


def in_another_order(self, messages, out, weight, accumulate):
    if not accumulate:
        out.zero_()
    for message in messages:
        out.add_(message[16:].view(torch.int8) * message[:4].view(torch.float32) / 127, alpha=weight)


def trusts(self, messages, out, weight, accumulate):
    if not all(message[:4].view(torch.float32).isfinite() for message in messages):
        raise IndexError("no such place")
    BytesPlan.decode(self, messages, out, weight, accumulate)


def writes_there(self, messages, out, weight, accumulate):
    BytesPlan.decode(self, messages, out, weight, accumulate)
    messages[:, 4:8] = 0


def needs_one(self, messages, out, weight, accumulate):
    messages[0]
    BytesPlan.decode(self, messages, out, weight, accumulate)


def overflows(self, vector, message, key):
    if vector.isfinite().all() and vector.abs().amax() > 1e20:
        raise OverflowError("too large for me")
    BytesPlan.encode(self, vector, message, key)


def by_the_first_scale(self, vector, message, key):
    self.scale = getattr(self, "scale", vector.abs().amax() / 127)
    codes = self.codes(vector, self.scale, key)
    message[:16].view(torch.float32)[:] = self.scale
    message[16:].view(torch.int8).copy_(codes)
    vector -= codes * self.scale


def halves(message, vector):
    """Scale, codes and elements of each half."""
    return zip(
        message[:16].view(torch.float32).tensor_split(2),
        message[16:].view(torch.int8).tensor_split(2),
        vector.tensor_split(2),
        strict=True,
    )


def by_halves(self, vector, message, key):
    for scale, codes, half in halves(message, vector):
        scale[:] = half.abs().amax() / 127 if len(half) else 0.0
        codes.copy_(self.codes(half, scale[0], key))
        half -= codes * scale[0]


def of_halves(self, messages, out, weight, accumulate):
    if not accumulate:
        out.zero_()
    for message in messages:
        for scale, codes, half in halves(message, out):
            half.add_(codes * scale[0], alpha=weight)


TERNARY = {"codes": at_random, "levels": 1}
HALVES = {"encode": by_halves, "decode": of_halves}


def test_a_codec_of_a_few_lines_passes():
    check_codec(Bytes(), size=lambda layout: 16 + layout.numel)
    check_codec(broken({"codes": at_random}, contractive=False))
    check_codec(broken(TERNARY, contractive=False), ranks=(2,))
    check_codec(broken({"encode": centred, "decode": with_middle}), ranks=(2,))
    check_codec(broken(HALVES), ranks=(2,))


def test_denormals_may_be_rounded_in_another_order():
    check_codec(broken({"encode": largest, "decode": in_another_order}), ranks=(2,))


@pytest.mark.parametrize(
    ("codec", "arguments", "words"),
    [
        (broken({"encode": forgets}), {}, "law 1 (conservation): "),
        (Bytes(), {"size": lambda layout: 8 + layout.numel}, "law 2 (size): "),
        (broken({"encode": skips_bytes}), {}, "unwritten bytes"),
        (broken({"encode": by_the_first_scale}), {}, "the message depends on more than vector and key"),
        (broken(made=FUSED), {}, "writes another message where what stays is not kept"),
        (Bytes(), {"lossless": Bytes()}, "law 3 (identity): "),
        (broken({"decode": differs}), {}, "law 4 (agreement): "),
        (broken({"decode": adds_wrongly}), {}, "three messages decoded at once are off their sum"),
        (broken({"encode": doubles}), {}, "is declared contractive, and leaves a norm of"),
        (broken(contractive=False), {}, "not declared contractive, but the mean over 32 keys is off"),
        (broken({"codes": alike}, contractive=False), {}, "law 8 (fidelity): "),
        (COMMON, {}, "draw from the key that encode is given"),
        (Bytes(), {"reference": lambda vector: vector}, "is off its reference"),
        (broken({"encode": without_half}), {}, "law 8 (fidelity): Broken() is declared contractive, but of a constant"),
        (broken({"encode": without_tail}), {}, "2 of the larger elements do not arrive at all"),
        (broken({"encode": without_fourths}), {}, "56 of the larger elements do not arrive at all"),
        (broken(TERNARY | {"factor": 0.95}, contractive=False), {}, "over 32 keys is off by -7.2% in "),
        (broken(TERNARY | {"factor": 1.2}, contractive=False), {}, "law 8 (fidelity): "),
        (broken(TERNARY | {"encode": without_small}, contractive=False), {}, "off by -100.0% in eighth 1 by size"),
        (broken(TERNARY | {"encode": without_half}, contractive=False), {}, "is off by -100.0% in eighth "),
        (broken(TERNARY | {"encode": without_tail}, contractive=False), {}, "2 of the larger elements do not arrive"),
        (broken({"encode": coarser_later}), {}, "law 6 (state is committed): Broken(): given the same vector and key"),
        (broken({"decode": smaller_later}), {}, "law 6 (state is committed): "),
        (broken({"encode": centred, "decode": with_middle}, keeps_zeros=True), {}, "law 8 (fidelity): Broken() of 300"),
        (broken({"levels": 15}, sparse=True), {}, "is declared sparse, but a message holds 9"),
        (broken(elementwise=True), {}, "is declared elementwise, and "),
        (broken(HALVES, elementwise=True), {}, "is declared elementwise, and elements change"),
        (broken({"codes": at_random}, contractive=False, correlated=True), {}, "same message after Plan.correlate"),
        (broken({"decode": trusts}), {}, "law 9 (any bytes): "),
        (broken({"decode": writes_there}), {}, "the messages were changed"),
        (broken({"decode": needs_one}), {}, "Broken(): messages of 1 elements: IndexError: index 0"),
        (broken({"used": 10**6}), {}, "law 2 (size): Broken() of 1 elements used 1000000 bytes"),
        (broken({"expected_size": 10**6}), {}, "law 2 (size): Broken() of 1 elements: expected_size is 1000000"),
        (broken({"encode": overflows}), {}, "Broken() of 1 elements (huge): OverflowError: too large for me"),
    ],
)
def test_a_broken_law_is_named(codec, arguments, words):
    with pytest.raises(AssertionError, match=re.escape(words)):
        check_codec(codec, **arguments)


@pytest.mark.parametrize(
    ("codec", "arguments", "words"),
    [
        (Bytes, {}, "check_codec(Bytes): give an object, made with its settings: check_codec(Bytes())"),
        ("topk", {}, "check_codec('topk'): give the method itself: check_codec(TopK())"),
        ("tpok", {}, "check_codec(MyCodec())"),
        (BytesPlan, {}, "that is a plan"),
        (Bytes(), {"lossless": Bytes}, "check_codec(lossless=Bytes): give an object"),
        (Bytes(), {"ranks": 2}, "such as ranks=(2, 3)"),
        (Bytes(), {"ranks": ()}, "check_codec(ranks=()): give numbers of ranks, at least one"),
        (Bytes(), {"ranks": (0,)}, "such as ranks=(2, 3)"),
        (Bytes(), {"exchanges": "two_shot"}, "exchanges={'mine': MyExchange()}"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_call(codec, arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_codec(codec, **arguments)


def test_exchanges_and_ranks_are_chosen_by_the_caller():
    from lightning_compress.contrib.exchanges.butterfly import Butterfly

    check_codec(TopK(0.05), exchanges={"butterfly": Butterfly()}, ranks=(4,))
    check_codec(Dense(), ranks=(1,), lossless=Dense())
