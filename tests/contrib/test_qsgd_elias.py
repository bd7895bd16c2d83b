"""QSGD's Elias coding: the same values as packed, as many bits as the paper says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lightning_compress.codecs import QSGD
from lightning_compress.contrib.codecs.qsgd_elias import EliasPlan, QSGDElias, expected_bits
from lightning_compress.core.layout import Layout
from tests.codecs.helpers import CPU, layout, make, trip, vectors
from tests.reference import sparse as reference

SETTINGS = [(2, 512, "l2"), (2, 64, "max"), (4, 512, "l2"), (6, 1024, "l2"), (8, 64, "l2"), (3, 4096, "l2")]


@pytest.mark.parametrize(("bits", "bucket", "norm"), SETTINGS)
@settings(deadline=None, derandomize=True, max_examples=25)
@given(vector=vectors())
def test_values_are_those_of_the_packed_coding(bits: int, bucket: int, norm: str, vector: torch.Tensor) -> None:
    packed = trip(QSGD(bits, bucket, norm), vector)  # type: ignore[arg-type]
    decoded, residual, message = trip(QSGD(bits, bucket, norm, "elias"), vector)  # type: ignore[arg-type]
    assert torch.equal(decoded, packed[0])
    assert torch.equal(residual, packed[1])
    if len(vector) < 5000:
        width = min(bucket, -(-len(vector) // 8) * 8)
        parsed = reference.parse_qsgd_elias(message, len(vector), bits, width)
        np.testing.assert_allclose(parsed, decoded.numpy(), rtol=2e-7, atol=0)


def bits_per_bucket(codec: QSGD, vector: torch.Tensor, draws: int) -> float:
    """Mean bits of a bucket's codes, without norm and length."""
    plan = codec.plan(Layout.of([("w", (len(vector),))]), CPU)
    message = torch.empty(plan.message_size, dtype=torch.uint8)
    buckets, total = len(vector) // codec.bucket, 0.0
    for key in range(draws):
        plan.encode(vector.clone(), message, key)
        total += (8 * plan.used - 48 * buckets) / buckets / draws
    return total


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "sparse"])
@pytest.mark.parametrize(("bits", "bucket"), [(2, 512), (2, 64), (4, 512)])
def test_expected_bits_at_few_levels(kind: str, bits: int, bucket: int) -> None:
    s, mean = 2 ** (bits - 1) - 1, bits_per_bucket(QSGD(bits, bucket, "l2", "elias"), make(kind, 200 * bucket), 5)
    nonzero = s * (s + math.sqrt(bucket))
    assert mean <= (3 + 1.5 * math.log2(2 * (s**2 + bucket) / nonzero)) * nonzero  # the paper's, without its o(1)
    assert mean <= expected_bits(bucket, s)


@pytest.mark.parametrize(("bits", "bucket"), [(4, 64), (6, 1024), (7, 4096)])
def test_expected_bits_at_as_many_levels_as_the_root(bits: int, bucket: int) -> None:
    for kind in ("normal", "heavy"):
        assert bits_per_bucket(QSGD(bits, bucket, "l2", "elias"), make(kind, 100 * bucket), 5) <= 2.8 * bucket
    # All elements on a level next to 1, where its o(1) shows: gaps, signs and levels of a bit each.
    constant = bits_per_bucket(QSGD(bits, bucket, "l2", "elias"), make("constant", 100 * bucket), 5)
    assert 2.8 * bucket < constant <= expected_bits(bucket, 2 ** (bits - 1) - 1)


def test_what_does_not_fit_stays() -> None:
    plan = QSGD(2, 64, "l2", "elias").plan(Layout.of([("w", (6400,))]), CPU)
    assert isinstance(plan, EliasPlan)
    plan._bits = 1000  # as if the codes were longer than ever
    vector, message, decoded = (
        make("normal", 6400),
        torch.empty(plan.message_size, dtype=torch.uint8),
        torch.empty(6400),
    )
    residual = vector.clone()
    plan.encode(residual, message, 1)
    plan.decode(message[None, : plan.used], decoded, 1.0, False)
    assert plan.used <= 600 + 125
    assert torch.equal(residual[3200:], vector[3200:])
    assert not decoded[3200:].any()
    assert decoded[:640].any()
    torch.testing.assert_close(decoded + residual, vector)


def test_places_beyond_what_float32_can_count() -> None:
    numel = (1 << 24) + 1000
    vector = torch.zeros(numel)
    vector[-3] = 5.0
    plan = QSGD(2, 512, "l2", "elias").plan(Layout.of([("w", (numel,))]), CPU)
    message, out = torch.empty(plan.message_size, dtype=torch.uint8), torch.empty(numel)
    plan.encode(vector, message, 0)
    plan.decode(message[None, : plan.used], out, 1.0, False)
    assert out[-3] == 5.0
    assert out.count_nonzero() == 1
    assert not vector.any()


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="coding must be one of 'packed', 'entropy', 'elias'"):
        QSGD(coding="huffman")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 4096 elements"):
        QSGD(bucket=8192, coding="elias")


def test_it_is_a_coding_of_qsgd():
    vector, messages = make("normal", 1000), []
    for codec in (QSGD(3, 64, "l2", coding="elias", correlated=True), QSGDElias(3, 64, "l2", correlated=True)):
        plan = codec.plan(layout(1000), CPU)
        messages.append(torch.zeros(plan.message_size, dtype=torch.uint8))
        plan.correlate(1, 1, 2)
        plan.encode(vector.clone(), messages[-1], 5)
    assert messages[0].equal(messages[1])
