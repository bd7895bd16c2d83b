"""The properties of scaled signs."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_compress.codecs import EFSign
from tests.codecs.helpers import KINDS, make, trip


@pytest.mark.parametrize("kind", KINDS)
def test_contracts_by_the_papers_factor(kind: str) -> None:
    vector = make(kind, 4096)
    _, residual, _ = trip(EFSign(512), vector)
    for before, after in zip(vector.double().split(512), residual.double().split(512), strict=True):
        square = before.square().sum()
        delta = before.abs().sum() ** 2 / (512 * square) if square else 0.0
        assert after.square().sum() <= (1 - delta + 1e-6) * square


def test_relative_error_of_normal_data() -> None:
    vector = make("normal", 1 << 20)
    _, residual, _ = trip(EFSign(4096), vector)
    error = residual.double().square().sum() / vector.double().square().sum()
    assert error == pytest.approx(1 - 2 / math.pi, rel=0.02)


def test_zeros_count_as_positive() -> None:
    decoded, residual, _ = trip(EFSign(), torch.tensor([0.0, -0.0, 2.0, -4.0]))
    assert decoded.tolist() == [1.5, 1.5, 1.5, -1.5]
    assert residual.tolist() == [-1.5, -1.5, 0.5, -2.5]


@pytest.mark.parametrize("block", [0, -64, 56, 100, 1024.0, "1024", None])
def test_bad_blocks(block: object) -> None:
    with pytest.raises(ValueError, match=r"EFSign\(block=.*multiple of 8, at least 64; try 1024"):
        EFSign(block=block)  # type: ignore[arg-type]
