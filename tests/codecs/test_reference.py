"""Every codec equals a slow reference written from its rules, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lightning_compress.codecs import BF16, FP16, Codec, Dense, EFSign, Natural, OneBit, RangeFloat, TopK
from lightning_compress.core.buffers import CHUNK
from tests.codecs.helpers import layout, make, trip, vectors
from tests.reference import codecs as reference


def expected(codec: Codec, vector: torch.Tensor, message: torch.Tensor) -> tuple[reference.Array, reference.Array]:
    values = vector.numpy()
    if isinstance(codec, TopK):
        segments = [(s.offset, s.end) for s in layout(len(vector)).segments if s.numel]
        ranges = segments if codec.scope == "parameter" else [(0, len(vector))]
        return reference.topk(values, codec.density, ranges)
    if isinstance(codec, OneBit) and codec.scope == "column":
        units = [(s.numel, s.start, math.prod(s.shape[1:])) for s in layout(len(vector)).segments]
        return reference.onebit_columns(values, units, codec.min_column)
    if isinstance(codec, OneBit):
        return reference.onebit(values, codec.block)
    if isinstance(codec, EFSign):
        return reference.efsign(values, codec.block)
    if isinstance(codec, Natural):
        return reference.natural(values, codec.bucket, key=1)
    if isinstance(codec, RangeFloat):
        mantissa = int(message[:4].view(torch.int32))
        assert codec.mantissa in ("auto", mantissa)
        return reference.range_float(values, codec.bits, mantissa, codec.block, codec.rounding == "nearest")
    return {Dense: reference.dense, FP16: reference.fp16, BF16: reference.bf16}[type(codec)](values)


def compare(codec: Codec, vector: torch.Tensor) -> None:
    decoded, residual, message = trip(codec, vector)
    sent, stays = expected(codec, vector, message)
    np.testing.assert_array_equal(decoded.numpy(), sent)  # takes 0.0 and -0.0 as equal
    np.testing.assert_array_equal(residual.numpy(), stays)
    if isinstance(codec, OneBit) and codec.scope == "block":
        np.testing.assert_array_equal(reference.parse_onebit(message, len(vector), codec.block), sent)
    if isinstance(codec, RangeFloat) and len(vector) < 5000:
        parsed = reference.parse_range_float(message, len(vector), codec.bits, codec.block, codec.rounding == "nearest")
        np.testing.assert_array_equal(parsed, sent)


RANGE_FLOATS = [
    RangeFloat(),
    RangeFloat(2, block=64),
    RangeFloat(5, 1, 72),
    RangeFloat(8, 7, 128),
    RangeFloat(10, 4, 1024, "truncate"),
    RangeFloat(13, 6),
    RangeFloat(16, "auto", 64),
    RangeFloat(32, 23),
    RangeFloat(32, 10, 64),
]


@pytest.mark.parametrize(
    "codec",
    [
        *(Dense(), FP16(), BF16(), TopK(0.01), TopK(0.2, "group"), TopK(0.7), TopK(1.0)),
        *(OneBit(), OneBit(64), OneBit(72), OneBit(scope="column"), OneBit(scope="column", min_column=5)),
        *RANGE_FLOATS,
        *(EFSign(), EFSign(72), Natural(), Natural(72)),
    ],
    ids=repr,
)
@settings(deadline=None, derandomize=True, max_examples=30)
@given(vector=vectors())
def test_equals_the_reference(codec: Codec, vector: torch.Tensor) -> None:
    compare(codec, vector)


@pytest.mark.parametrize(
    "codec",
    [FP16(), TopK(0.01), TopK(0.6, "group"), OneBit(), OneBit(72), OneBit(scope="column"), EFSign(72), RangeFloat()],
    ids=repr,
)
def test_equals_the_reference_over_several_chunks(codec: Codec) -> None:
    compare(codec, make("normal", 2 * CHUNK + 12_345))
