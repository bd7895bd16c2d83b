"""What every codec owes, on vectors of every kind."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.codecs import (
    BF16,
    FP16,
    Codec,
    Dense,
    OneBit,
    TopK,
)
from lightning_compress.codecs.spectral.spectrum import Spectral
from lightning_compress.testing.single_rank import rows_added, written
from tests.cases import case_of
from tests.codecs.helpers import CODECS, CPU, layout, make, trip, vectors

VARIABLE = [codec for codec in CODECS if codec.plan(layout(1000), CPU).variable]
every = pytest.mark.parametrize("codec", CODECS, ids=repr)
SCALES = [10.0**exponent for exponent in range(-35, 31, 5)]
modest = settings(deadline=None, derandomize=True, max_examples=40)


@every
@modest
@given(vector=vectors())
def test_conservation(codec: Codec, vector: torch.Tensor) -> None:
    decoded, residual, _ = trip(codec, vector)
    assert torch.isfinite(residual).all()
    together = decoded.double() + residual.double()
    tolerance = last_bit(codec, vector, decoded)
    assert ((together - vector.double()).abs() <= tolerance).all()
    if codec.contractive:
        assert residual.double().norm() <= vector.double().norm() * (1 + 1e-6)


def last_bit(codec: Codec, vector: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """By what message and rest may differ from the vector, as the method's row says."""
    loses = case_of(codec).loses
    if loses == "nothing":
        return torch.zeros(len(vector), dtype=torch.float64)
    if loses == "added":  # up to 20 times as much was taken off
        largest = (decoded.double().abs() + vector.double().abs()).amax().expand(len(vector))
    elif loses == "element":
        largest = torch.maximum(vector.abs(), decoded.abs()).double()
    else:  # blocks may lie across each other, and few levels may be off by more than the largest element
        blocks = vector.split(len(vector) if loses == "vector" else codec.block)
        largest = torch.cat([block.abs().amax().expand(len(block)) for block in blocks])
        largest = torch.maximum(largest, decoded.abs()).double()  # the L2 norm is larger than any element
    return 2.0**-23 * largest + 2.0**-149


@every
def test_gradients_of_any_scale_lose_the_same(codec: Codec) -> None:
    """What is not sent stays in the vector."""
    case, errors = case_of(codec), {}
    for scale in SCALES:
        vector = make("normal", 1000, 3) * scale
        decoded, residual, _ = trip(codec, vector)
        assert decoded.isfinite().all()
        together = decoded.double() + residual.double()
        off = (together - vector.double()).abs() - 2.0**-24 * vector.double().abs()  # where fp16 saturates
        assert (off <= last_bit(codec, vector, decoded)).all()
        errors[scale] = float((decoded.double() - vector.double()).norm() / vector.double().norm())
    case.check_errors(errors)


@every
@modest
@given(vector=vectors(), key=st.integers(0, 2**64 - 1))
def test_equal_vectors_and_keys_give_equal_bytes(codec: Codec, vector: torch.Tensor, key: int) -> None:
    first, again, sent = written(codec, vector, key)
    assert first.equal(again)
    assert first.equal(sent)
    plan = codec.plan(layout(len(vector)), CPU)
    assert plan.variable or len(first) == plan.message_size


@pytest.mark.parametrize("codec", VARIABLE, ids=repr)
@modest
@given(vector=vectors(), extra=st.integers(0, 64), seed=st.integers(0, 2**32))
def test_rows_end_anywhere_from_what_was_used(codec: Codec, vector: torch.Tensor, extra: int, seed: int) -> None:
    decoded, _, message = trip(codec, vector)
    plan = codec.plan(layout(len(vector)), CPU)
    rows = torch.randint(0, 256, (2, min(len(message) + extra, plan.message_size)), dtype=torch.uint8)
    rows[:, : len(message)] = message
    out = torch.empty(len(vector))
    plan.decode(rows[1:], out, 1.0, False)
    assert torch.equal(out, decoded)
    with pytest.raises(ValueError, match="truncated"):
        plan.decode(rows[:, : len(message) - 1], out, 1.0, False)
    spoilt = rows.clone()  # some bytes of a real message
    generator = torch.Generator().manual_seed(seed)
    for place in torch.randint(0, len(message), (3,), generator=generator).tolist():
        spoilt[0, place] = int(torch.randint(0, 256, (), generator=generator))
    guarded = torch.full((len(vector) + 200,), 5.0)
    with contextlib.suppress(ValueError):
        plan.decode(spoilt, guarded[100:-100], 1.0, False)
    assert (guarded[:100] == 5).all()
    assert (guarded[-100:] == 5).all()


@every
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("numel", [1, 100, 5000])
def test_decode_sums_rows_in_order(codec: Codec, accumulate: bool, numel: int) -> None:
    out, expected = rows_added(codec, numel, accumulate, anywhere=True)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    plan = codec.plan(layout(numel), CPU)
    plan.decode(torch.zeros(0, plan.message_size, dtype=torch.uint8), out, 0.25, False)
    assert not out.any()


@every
@modest
@given(seed=st.integers(0, 2**32), numel=st.integers(1, 3000), accumulate=st.booleans())
def test_any_bytes_stay_inside(codec: Codec, seed: int, numel: int, accumulate: bool) -> None:
    plan = codec.plan(layout(numel), CPU)
    generator = torch.Generator().manual_seed(seed)
    messages = torch.randint(0, 256, (2, plan.message_size), dtype=torch.uint8, generator=generator)
    guarded = torch.full((numel + 200,), 5.0)
    if isinstance(codec, TopK) and codec.indices == "int32":  # random indices are hardly ever all inside
        with pytest.raises(ValueError, match="indices outside"):
            plan.decode(messages, guarded[100:-100], 1.0, accumulate)
        assert (guarded == 5).all()
    else:
        refuses = plan.variable or isinstance(codec, TopK | Spectral)
        with contextlib.suppress(ValueError) if refuses else contextlib.nullcontext():
            plan.decode(messages, guarded[100:-100], 1.0, accumulate)
    assert (guarded[:100] == 5).all()
    assert (guarded[-100:] == 5).all()


@every
def test_wrong_lengths_are_refused(codec: Codec) -> None:
    plan = codec.plan(layout(100), CPU)
    message = torch.zeros(plan.message_size, dtype=torch.uint8)
    rows = torch.zeros(1, plan.message_size + 1, dtype=torch.uint8) if plan.variable else message[None, :-1]
    with pytest.raises(ValueError, match="truncated"):
        plan.decode(rows, torch.zeros(100), 1.0, False)
    with pytest.raises(ValueError, match="truncated"):
        plan.encode(torch.zeros(100), message[:-1], 0)
    with pytest.raises(ValueError, match="this plan is for"):
        plan.encode(torch.zeros(99), message, 0)
    with pytest.raises(ValueError, match="this plan is for"):
        plan.decode(message[None], torch.zeros(100, dtype=torch.float64), 1.0, False)


@every
def test_empty_vector(codec: Codec) -> None:
    plan = codec.plan(layout(1).cut(0, 0), CPU)
    assert plan.message_size == 0
    message = torch.zeros(0, dtype=torch.uint8)
    plan.encode(torch.zeros(0), message, 0)
    plan.decode(message[None], torch.zeros(0), 1.0, True)


@pytest.mark.parametrize("numel", [1, 7, 64, 1000, 1024, 1025, 70_000])
def test_message_size_follows_the_formula(numel: int) -> None:
    def size(codec: Codec) -> int:
        return codec.plan(layout(numel), CPU).message_size

    assert size(Dense()) == 4 * numel
    assert size(FP16()) == size(BF16()) == 2 * numel
    assert size(TopK(0.01, "group")) == 8 * max(1, math.ceil(0.01 * numel))
    sizes = [segment.numel for segment in layout(numel).segments]
    assert size(TopK(0.01)) == sum(8 * max(1, math.ceil(0.01 * n)) for n in sizes)
    means = 8 * math.ceil(numel / 512)
    assert size(OneBit(512)) == math.ceil(means / 16) * 16 + math.ceil(numel / 8)
