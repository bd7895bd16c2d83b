"""The properties of 1-bit SGD's quantizer."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_compress.codecs import OneBit
from tests.codecs.helpers import make, trip


@pytest.mark.parametrize("block", [64, 1000, 4096])
def test_residual_sums_to_zero_in_each_block(block: int) -> None:
    vector = make("normal", 70_001)
    _, residual, _ = trip(OneBit(block), vector)
    for before, after in zip(vector.split(block), residual.split(block), strict=True):
        assert abs(after.double().sum()) <= 2.0**-24 * before.abs().double().sum()


def test_relative_error_of_normal_data() -> None:
    vector = make("normal", 1 << 20)
    _, residual, _ = trip(OneBit(4096), vector)
    error = residual.double().square().sum() / vector.double().square().sum()
    assert error == pytest.approx(1 - 2 / math.pi, rel=0.02)


def test_signs_and_empty_sides() -> None:
    vector = torch.tensor([0.0, -0.0, 2.0, 4.0])
    decoded, residual, _ = trip(OneBit(), vector)
    assert decoded.tolist() == [1.5] * 4
    assert residual.tolist() == [-1.5, -1.5, 0.5, 2.5]
    decoded, residual, _ = trip(OneBit(), torch.tensor([-1.0, -3.0]))
    assert decoded.tolist() == [-2.0, -2.0]


def test_sides_of_very_different_size_keep_their_means() -> None:
    decoded, residual, _ = trip(OneBit(), torch.tensor([1e30, -1.0, -3.0, 1e30]))
    assert decoded.tolist() == pytest.approx([1e30, -2.0, -2.0, 1e30])
    assert residual.tolist() == [0.0, 1.0, -1.0, 0.0]


@pytest.mark.parametrize("block", [0, -64, 56, 100, 1024.0, "1024", None])
def test_bad_blocks(block: object) -> None:
    with pytest.raises(ValueError, match=r"OneBit\(block=.*multiple of 8, at least 64; try 1024"):
        OneBit(block=block)  # type: ignore[arg-type]
