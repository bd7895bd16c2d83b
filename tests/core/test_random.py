"""Random bits: the same everywhere, uniform, and independent for other keys and places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_compress.core.random import PER_WORD, RandomBits, draw_places, hash_torch, mix
from tests.codecs.helpers import CPU
from tests.reference.codecs import random16

NUMEL = 1 << 20


def draw(key: int, first: int = 0, numel: int = NUMEL) -> np.ndarray:
    return RandomBits(numel, CPU).draw(key, first, numel).numpy().copy()


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_equals_plain_integers(key: int) -> None:
    numel = 40_003
    assert draw(key, numel=numel).tolist() == random16(key, numel)


@pytest.mark.parametrize("key", [0, 7, 2**64 - 1])
def test_the_accelerators_way_draws_the_same(key: int) -> None:
    words = torch.empty(50_000, dtype=torch.int64)
    hash_torch(words, mix(key))
    assert words.view(torch.int16).tolist() == draw(key, numel=200_000).tolist()


def test_any_part_can_be_had_alone() -> None:
    whole = draw(3)
    for first, numel in ((0, 10), (4, 1), (32_768 - 4, 70_000), (NUMEL - 8, 8)):
        np.testing.assert_array_equal(draw(3, first, numel), whole[first : first + numel])


@pytest.mark.parametrize("key", [0, 1, 12345, 2**64 - 1])
def test_uniform(key: int) -> None:
    values = draw(key).view(np.uint16)
    for lane in range(4):
        for shift in (0, 8):  # chi-squared of 255 degrees of freedom: 255 +- 6 * 22.6
            counts = np.bincount(values[lane::4] >> shift & 255, minlength=256)
            assert abs(((counts - len(values) / 1024) ** 2).sum() / (len(values) / 1024) - 255) < 136
    bits = np.unpackbits(values.view(np.uint8))
    assert abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(len(bits))


@pytest.mark.parametrize("other", [1, 2, 2**32, 2**63, 0x9E3779B97F4A7C15])
def test_other_keys_and_places_are_independent(other: int) -> None:
    one, two = (draw(key).astype(np.float64) / 2**15 for key in (0, other))
    limit = 6 / 3 / np.sqrt(NUMEL)  # each has variance 1/3
    for shift in range(8):
        assert abs((one[shift:] * two[: NUMEL - shift]).mean()) < limit
        if shift:
            assert abs((one[shift:] * one[:-shift]).mean()) < limit
    assert abs((one == two).mean() - 2**-16) < 6 * 2**-8 / np.sqrt(NUMEL)


def test_every_place_of_a_long_stretch_may_be_drawn() -> None:
    starts, lengths = torch.arange(4096) * 2**22, torch.full((4096,), 2**22)
    random = RandomBits(PER_WORD * len(starts), CPU)
    places = draw_places(random, 7, starts, lengths, torch.empty_like(starts)) - starts
    assert 0 <= places.min() < 2**14
    assert 2**22 - 2**14 < places.max() < 2**22
    assert (places % 64).bincount(minlength=64).min() > 0  # 16 bits reach every 64th only
