"""Every codec equals a slow reference written from its rules, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lightning_compress.codecs import FP16, Codec, EFSign, OneBit, RangeFloat, TopK
from lightning_compress.core.workspace import CHUNK
from tests.cases import CASES as TABLE
from tests.cases import Case
from tests.codecs.helpers import layout, make, trip, vectors
from tests.reference import codecs as reference

CASES = [case for case in TABLE if case.reference]


def compare(case: Case, codec: Codec, vector: torch.Tensor) -> None:
    decoded, residual, message = trip(codec, vector)
    assert case.reference is not None
    sent, stays = case.reference(codec, vector.numpy(), layout(len(vector)), message)
    np.testing.assert_array_equal(decoded.numpy(), sent)  # takes 0.0 and -0.0 as equal
    np.testing.assert_array_equal(residual.numpy(), stays)
    if isinstance(codec, OneBit) and codec.scope == "block":
        np.testing.assert_array_equal(reference.parse_onebit(message, len(vector), codec.block), sent)
    if isinstance(codec, RangeFloat) and len(vector) < 5000:
        parsed = reference.parse_range_float(message, len(vector), codec.bits, codec.block, codec.rounding == "nearest")
        np.testing.assert_array_equal(parsed, sent)


@pytest.mark.parametrize(
    ("case", "codec"),
    [pytest.param(case, codec, id=repr(codec)) for case in CASES for codec in (case.codec, *case.also)],
)
@settings(deadline=None, derandomize=True, max_examples=30)
@given(vector=vectors())
def test_equals_the_reference(case: Case, codec: Codec, vector: torch.Tensor) -> None:
    compare(case, codec, vector)


@pytest.mark.parametrize(
    "codec",
    [FP16(), TopK(0.01), TopK(0.2, "group"), OneBit(), OneBit(72), OneBit(scope="column"), EFSign(72), RangeFloat()],
    ids=repr,
)
def test_equals_the_reference_over_several_chunks(codec: Codec) -> None:
    case = next(case for case in CASES if case.codec == codec or codec in case.also)
    compare(case, codec, make("normal", 2 * CHUNK + 12_345))
