"""SparseLoCo's messages: their format, what they leave behind, and bad settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lightning_compress.codecs import SparseLoCo
from lightning_compress.codecs.sparse.sparseloco import _Chooser, _sorted
from lightning_compress.core.layout import Layout
from tests.codecs.helpers import CPU, make, trip, vectors
from tests.reference import sparse as reference


def test_a_parameter_of_whole_blocks_takes_fourteen_bits_an_element() -> None:
    size = SparseLoCo().plan(Layout.of([("weight", (1024, 1024))]), CPU).message_size
    assert 8 * (size - 16) / 1024**2 == 14 * 64 / 4096
    assert round(8 * size / 1024**2, 3) == 0.219


def test_the_message_is_as_described() -> None:
    numel, start = 10_000, 5000  # a block and the rest of one; then less than a block for each of two more
    codec, vector = SparseLoCo(), make("normal", numel, 5)
    decoded, _, message = trip(codec, vector)  # in three parameters, of 5000, 3333 and 1667
    raw, levels = bytes(message.tolist()), np.frombuffer(bytes(message[:48].tolist()), np.float32).reshape(3, 4)
    blocks = [(0, 4096, 64, 0), (4096, 904, 15, 0), (start, 3333, 53, 1), (start + 3333, 1667, 27, 2)]
    places, used = reference.read_codes(raw[48:], 64 + 15 + 53 + 27, 12)
    bins, rest = reference.read_codes(raw[48 + used :], len(places), 2)
    assert 48 + used + rest == len(raw)
    out, slot = np.zeros(numel, np.float32), 0
    for first, length, keep, part in blocks:
        mine = places[slot : slot + keep]
        assert mine == sorted(set(mine))
        assert mine[-1] < length
        for place, code in zip(mine, bins[slot : slot + keep], strict=True):
            out[first + place] = levels[part][code]
        slot += keep
    np.testing.assert_array_equal(out, decoded.numpy())


@settings(deadline=None, derandomize=True, max_examples=30)
@given(vector=vectors())
def test_an_accelerator_chooses_alike(vector: torch.Tensor) -> None:
    rows = vector[: len(vector) // 5 * 5].view(5, -1)
    for keep in {1, 4, rows.shape[1]} if rows.shape[1] >= 4 else ():
        host, other = (torch.zeros(5, keep, dtype=torch.int32) for _ in range(2))
        _Chooser().choose(rows, host)
        _sorted(rows, other)
        assert host.equal(other)


def test_two_bits_of_the_largest_leave_hardly_more_than_exact_values() -> None:
    vector = make("normal", 1 << 16)
    _, residual, _ = trip(SparseLoCo(), vector)
    largest = vector.view(-1, 4096).abs().topk(64).values
    left = float(residual.square().sum()) / float(vector.square().sum())
    exact = 1 - float(largest.square().sum()) / float(vector.square().sum())
    assert exact < left < exact + 0.01


@pytest.mark.parametrize("value", [-3.0, 2.0])
def test_what_stays_zero_is_not_sent(value: float) -> None:
    vector = torch.zeros(9000)
    vector[[17, 5000]] = value
    decoded, residual, _ = trip(SparseLoCo(), vector)
    assert decoded.equal(vector)
    assert not residual.any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k": 3}, "k=3"),
        ({"k": True}, "k=True"),
        ({"k": 65, "block": 64}, "k must be 4 to 64, the block"),
        ({"k": 64.0}, "k=64.0"),
        ({"block": 96}, "block=96"),
        ({"block": 32}, "power of two, 64 to 65536"),
        ({"block": 1 << 17}, "power of two, 64 to 65536"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SparseLoCo(**given)
