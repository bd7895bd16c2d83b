"""Range-based floats as a quantiser."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.codecs import RangeFloat
from tests.codecs.helpers import KINDS, make, trip


def mantissa(message: torch.Tensor) -> int:
    return int(message[:4].view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_32_bits_lose_nothing(kind: str) -> None:
    vector = make(kind, 10_000)
    decoded, residual, _ = trip(RangeFloat(32, 23), vector)
    assert torch.equal(decoded, vector)
    assert not residual.any()


def one_sided(numel: int) -> torch.Tensor:
    """Small of one sign and one large of the other, as in the gradient of a classifier's head."""
    return (-make("normal", numel).abs()).index_fill_(0, torch.tensor([7]), 100.0)


@pytest.mark.parametrize("bits", [4, 6, 8, 10])
@pytest.mark.parametrize("vector", [make("normal", 1024), one_sided(1024)], ids=["normal", "one-sided"])
def test_automatic_mantissa_is_the_best_one(bits: int, vector: torch.Tensor) -> None:
    errors = [float(trip(RangeFloat(bits, m), vector)[1].norm()) for m in range(bits - 1)]
    _, residual, message = trip(RangeFloat(bits), vector)
    assert mantissa(message) == errors.index(min(errors))
    assert float(residual.norm()) == min(errors)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_sample_of_zeros_takes_the_mantissa_of_normal_data(bits: int) -> None:
    normal = make("normal", 4096)
    _, _, expected = trip(RangeFloat(bits, block=4096), normal)
    embedding = torch.cat([torch.zeros(4096), normal, torch.zeros(7 * 4096)])  # most rows are not in this batch
    _, _, message = trip(RangeFloat(bits, block=4096), embedding)
    assert abs(mantissa(message) - mantissa(expected)) <= 1


@pytest.mark.parametrize("kind", ["normal", "heavy", "huge", "lopsided"])
def test_ends_have_the_precision_of_all(kind: str) -> None:
    vector = make(kind, 5000)
    _, residual, message = trip(RangeFloat(block=64), vector)
    for before, after in zip(vector.double().split(64), residual.double().split(64), strict=True):
        place = before.abs().argmax()
        assert abs(after[place]) <= 2.0 ** -(mantissa(message) + 1) * abs(before[place])


def test_the_largest_floats_stay_finite() -> None:
    largest = torch.finfo(torch.float32).max
    vector = torch.tensor([largest, -largest, 1.0] * 40)
    for bits in (4, 8, 32):
        decoded, residual, _ = trip(RangeFloat(bits), vector)
        assert torch.isfinite(decoded).all()
        assert torch.equal(decoded.double() + residual.double(), vector.double())


def test_truncation_makes_magnitudes_smaller() -> None:
    vector = make("normal", 20_000)
    cut, rounded = (trip(RangeFloat(8, 3, rounding=rounding), vector)[0] for rounding in ("truncate", "nearest"))
    assert (cut.abs() <= vector.abs()).all()
    assert abs(rounded.abs().mean() / vector.abs().mean() - 1) < 1e-3


def test_feedback_and_adam() -> None:
    assert RangeFloat().contractive
    assert RangeFloat().safe_with_adam
    assert not RangeFloat(4).safe_with_adam


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 1}, "bits must be 2 to 16, or 32"),
        ({"bits": 17}, "bits must be 2 to 16, or 32"),
        ({"bits": True}, "bits must be 2 to 16, or 32"),
        ({"bits": 8, "mantissa": 8}, "mantissa must be 'auto', or 0 to 7 for 8 bits"),
        ({"bits": 32, "mantissa": 24}, "mantissa must be 'auto', or 0 to 23 for 32 bits"),
        ({"mantissa": "best"}, "mantissa must be 'auto'"),
        ({"block": 60}, "multiple of 8, at least 64; try 4096"),
        ({"rounding": "up"}, "rounding must be 'nearest' or 'truncate'"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=r"RangeFloat\(.*" + message):
        RangeFloat(**settings)  # type: ignore[arg-type]
