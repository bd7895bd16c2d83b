"""The loops of range-based floats do what tensor operations do, bit by bit, wherever numbers lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs import RangeFloat
from lightning_compress.codecs.codec import Shard, ShardCoder
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Memory, Source
from lightning_compress.core.vector import Vector, kernel_of
from tests.codecs.quantize.test_minifloat_numba import BITS, floats
from tests.helpers.table import table

pytest.importorskip("numba")

CPU = torch.device("cpu")
modest = settings(deadline=None, derandomize=True, max_examples=250)


def layout_of(numel: int) -> Layout:
    return Layout.of([("weight", (numel,))])


@st.composite
def codecs(draw: st.DrawFn) -> RangeFloat:
    bits = draw(st.sampled_from(BITS))
    mantissa = draw(st.just("auto") | st.integers(0, min(bits - 1, 23)))
    block = draw(st.sampled_from([64, 72, 136, 1032, 2048, 1 << 20]))
    return RangeFloat(bits, mantissa, block, draw(st.sampled_from(["nearest", "truncate"])))


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Normal numbers of many magnitudes, with some special ones, zeros and constant stretches."""
    numel = draw(st.integers(0, 300) | st.sampled_from([1024, 2065, 4104, 5000]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    scales = 10.0 ** random.integers(-44, 38, 5)[np.arange(numel) * 5 // max(numel, 1)]
    with np.errstate(over="ignore", under="ignore"):
        values = (random.standard_normal(numel) * scales).astype(np.float32)
    pool = np.array(draw(st.lists(floats, min_size=1, max_size=5)), np.float32)
    values = np.where(random.random(numel) < draw(st.sampled_from([0, 0.01, 0.5])), random.choice(pool, numel), values)
    first, last = sorted(random.integers(0, numel + 1, 2))
    if draw(st.booleans()):
        values[first:last] = draw(floats)
    return torch.from_numpy(np.nan_to_num(values, nan=1.0, posinf=np.inf, neginf=-np.inf))


def bits_of(vector: Tensor) -> bytes:
    return vector.numpy().tobytes()


def encoded(codec: RangeFloat, vector: Tensor) -> tuple[Tensor, Tensor]:
    plan, rest = codec.plan(layout_of(len(vector)), CPU), vector.clone()
    message = torch.full((plan.message_size,), 255, dtype=torch.uint8)
    plan.encode(rest, message, 0)
    return message, rest


@modest
@given(codecs(), vectors())
def test_same_messages_and_same_rest(codec, vector):
    message, rest = encoded(codec, vector)
    with kernels.using("torch"):
        wanted, left = encoded(codec, vector)
    assert bits_of(message) == bits_of(wanted)
    assert bits_of(rest) == bits_of(left)
    again, plan = torch.full_like(message, 255), codec.plan(layout_of(len(vector)), CPU)
    given = vector.clone()
    plan.encode_from(Source(given), None, again, 0)
    assert bits_of(again) == bits_of(wanted)
    assert bits_of(given) == bits_of(vector)


@modest
@given(codecs(), vectors(), st.integers(0, 3), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_same_sums_of_any_bytes(codec, vector, count, accumulate, damaged, seed):
    message, _ = encoded(codec, vector)
    messages, random = message.repeat(count, 1), np.random.default_rng(seed)
    if damaged:
        messages = torch.from_numpy(random.integers(0, 256, messages.shape, np.uint8))
    for row in messages[1:]:
        row[20 : 20 + len(message) // 2].copy_(torch.from_numpy(random.permutation(row[20 : 20 + len(message) // 2])))
    wide = torch.zeros(count, len(message) + 16, dtype=torch.uint8)
    wide[:, : len(message)] = messages

    def decoded() -> Tensor:
        out = torch.linspace(-1, 1, len(vector))
        codec.plan(layout_of(len(vector)), CPU).decode(wide[:, : len(message)], out, 1 / 3, accumulate)
        return out

    out = decoded()
    with kernels.using("torch"):
        assert bits_of(out) == bits_of(decoded())


@table("bits", [5, 8, 10, 32])
def test_gradients_in_pieces_and_their_means(bits):
    """Out of order in memory, with an addend; and decoded into such pieces."""
    codec, numel = RangeFloat(bits, block=128), 1000
    generator = torch.Generator().manual_seed(bits)
    memory, addend = torch.randn(2, numel, generator=generator)
    pieces = [memory[600:], memory[:37], memory[37:600]]
    vector = Vector(Memory(pieces, kernel_of(CPU)))
    vector.send(torch.empty(numel), addend)
    plan, rest = codec.plan(layout_of(numel), CPU), torch.empty(numel)
    message = torch.empty(plan.message_size, dtype=torch.uint8)
    plan.encode_from(vector.source, rest, message, 0)
    with kernels.using("torch"):
        wanted, left = encoded(codec, torch.cat(pieces) + addend)
        out = torch.empty(numel)
        codec.plan(layout_of(numel), CPU).decode(wanted[None], out, 0.5, False)
    assert bits_of(message) == bits_of(wanted)
    assert bits_of(rest) == bits_of(left)
    assert plan.in_pieces
    plan.decode(message[None], vector.memory.place, 0.5, False)
    assert bits_of(torch.cat(pieces)) == bits_of(out)


@table("keep", [False, True])
@table("bits", [3, 8, 16])
def test_shards_in_one_call(bits, keep):
    """As each by itself; but not together with shards of other settings."""
    codec, spans = RangeFloat(bits, block=64), [(0, 640), (640, 64), (704, 100)]
    vector = torch.randn(804, generator=torch.Generator().manual_seed(bits))
    plans, shards, at = [], [], 32
    for start, numel in spans:
        plan = codec.plan(layout_of(numel), CPU)
        shards.append(Shard(start, numel, plan, at, plan.message_size, 0, 0))
        plans, at = [*plans, plan], at + plan.message_size + 16
    messages, rest = torch.full((at,), 7, dtype=torch.uint8), torch.zeros(804)
    wanted, left, out = messages.clone(), vector.clone(), torch.ones(804)
    summed = out.clone()
    for plan, shard in zip(plans, shards, strict=True):
        span, place = slice(shard.start, shard.start + shard.numel), slice(shard.at, shard.at + shard.size)
        plan.encode(left[span], wanted[place], 0)
        plan.decode(wanted[place][None], summed[span], 0.25, True)
    coder = plans[0]
    assert isinstance(coder, ShardCoder)
    planned = coder.shards(shards, CPU)
    coder.encode_shards(Source(vector), rest if keep else None, messages, planned, 0)
    assert bits_of(messages) == bits_of(wanted)
    assert bits_of(rest) == bits_of(left if keep else torch.zeros(804))
    coder.decode_shards(messages, planned, out, 0.25, True, None)
    assert bits_of(out) == bits_of(summed)
    other = RangeFloat(bits, block=128).plan(layout_of(100), CPU)
    assert coder.shards([*shards, shards[0]._replace(coder=other)], CPU) is None


def test_what_is_no_number_stays_in_its_block():
    """It is refused before; and if not, nothing else is spoilt."""
    codec, vector = RangeFloat(8, 3, block=64), torch.randn(64 * 5, generator=torch.Generator().manual_seed(0))
    wanted, _ = encoded(codec, vector)
    vector[70] = torch.nan
    message, _ = encoded(codec, vector)
    plan, (fine, found) = codec.plan(layout_of(64 * 5), CPU), torch.zeros(2, 64 * 5)
    plan.decode(wanted[None], fine, 1.0, False)
    plan.decode(message[None], found, 1.0, False)
    found[64:128] = fine[64:128]
    assert torch.equal(found, fine)
