"""1-bit SGD by the column: what a column is, and that means are its own."""

from __future__ import annotations

import math
import re

import pytest
import torch

from lightning_compress.codecs import OneBit
from lightning_compress.codecs.sign.onebit import columns
from lightning_compress.core.layout import Layout
from tests.codecs.helpers import CPU, make
from tests.reference import codecs as reference

COLUMN = OneBit(scope="column")


def trip(codec: OneBit, layout: Layout, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What was sent, what stays, and the bytes between."""
    plan = codec.plan(layout, CPU)
    message = torch.full((1, plan.message_size), 0xAB, dtype=torch.uint8)
    stays, sent = vector.clone(), torch.full_like(vector, torch.nan)
    plan.encode(stays, message[0], 1)
    plan.decode(message, sent, 1.0, False)
    return sent, stays, plan.message_size


@pytest.mark.parametrize("shape", [(50, 333), (7, 64, 3, 3), (3, 300_001), (1, 70)])
def test_a_column_is_what_feeds_one_unit_and_its_residual_sums_to_zero(shape: tuple[int, ...]) -> None:
    vector = make("normal", math.prod(shape)) * torch.arange(1, shape[0] + 1).repeat_interleave(math.prod(shape[1:]))
    sent, stays, size = trip(COLUMN, Layout.of([("weight", shape)]), vector)
    for before, after, values in zip(*(each.view(shape[0], -1) for each in (vector, stays, sent)), strict=True):
        assert abs(after.double().sum()) <= 2.0**-24 * before.abs().double().sum()
        assert len(values.unique()) == 2
    assert len(sent.unique()) == 2 * shape[0]
    assert size == -(-8 * shape[0] // 16) * 16 + -(-math.prod(shape) // 8)


def test_relative_error_of_normal_data() -> None:
    vector = make("normal", 1 << 20)
    _, stays, _ = trip(COLUMN, Layout.of([("weight", (512, 2048))]), vector)
    error = stays.double().square().sum() / vector.double().square().sum()
    assert error == pytest.approx(1 - 2 / math.pi, rel=0.02)


def test_units_of_different_scale_are_closer_than_blocks() -> None:
    layout, scale = Layout.of([("weight", (640, 100))]), torch.arange(640).fmod(7).exp2()
    vector = make("normal", 64_000) * scale.repeat_interleave(100)
    errors = [trip(codec, layout, vector)[1].norm() for codec in (COLUMN, OneBit(1024))]
    assert errors[0] < 0.99 * errors[1]


@pytest.mark.parametrize(
    ("shape", "cut", "min_column", "expected"),
    [
        ((10, 100), (0, 1000), 64, [(10, 100)]),
        ((10, 9), (0, 90), 64, [(1, 72), (1, 18)]),  # eight units, then what is left
        ((10, 9), (0, 90), 1, [(10, 9)]),
        ((10, 100), (150, 420), 64, [(1, 50), (2, 100), (1, 20)]),
        ((10, 100), (110, 140), 64, [(1, 30)]),
        ((1000,), (0, 1000), 64, [(15, 64), (1, 40)]),
        ((), (0, 1), 64, [(1, 1)]),
        ((4, 10), (0, 40), 1000, [(1, 40)]),
    ],
)
def test_runs_of_columns(shape, cut, min_column, expected) -> None:  # type: ignore[no-untyped-def]
    (segment,) = Layout.of([("weight", shape)]).cut(*cut).segments
    assert columns(segment, min_column) == expected
    assert sum(count * length for count, length in expected) == segment.numel


def test_shards_of_several_parameters_are_the_references() -> None:
    whole = Layout.of([("conv", (16, 9, 3, 3)), ("first", (32, 3, 3, 3)), ("linear", (77, 129))])
    vector = make("heavy", whole.numel)
    for start, stop in ((0, whole.numel), (64, 2048), (1000, 1003), (2048, whole.numel)):
        layout = whole.cut(start, stop)
        sent, stays, _ = trip(COLUMN, layout, vector[start:stop])
        units = [(each.numel, each.start, math.prod(each.shape[1:])) for each in layout.segments]
        expected, left = reference.onebit_columns(vector[start:stop].numpy(), units, 64)
        assert sent.equal(torch.from_numpy(expected))
        assert stays.equal(torch.from_numpy(left))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "row"}, "OneBit(scope='row'): scope must be one of block, column"),
        ({"min_column": 0}, "OneBit(min_column=0)"),
        ({"min_column": 1.5}, "OneBit(min_column=1.5)"),
        ({"min_column": True}, "OneBit(min_column=True)"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        OneBit(**settings)  # type: ignore[arg-type]
