"""TernGrad with shared scales: whole numbers that never run over, the mean, the bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.contrib.codecs.ternary import RUN
from lightning_compress.contrib.reducers.terngrad_shared import TernGradShared, digits_of
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from tests.reducers.helpers import trips
from tests.reference import ternary as reference

LAYOUT = Layout.of([("a", (41, 37)), ("b", (3, 19)), ("none", (0,)), ("c", (500,))])
RANGES = [(segment.offset, segment.end) for segment in LAYOUT.segments if segment.numel]
RANKS = [1, 2, 3, 4, 5, 16, 31]


def vectors(rank: int) -> list[torch.Tensor]:
    """Two steps, other data and other sizes on every rank."""
    generator = torch.Generator().manual_seed(rank)
    steps = [torch.randn(LAYOUT.numel, generator=generator) * (1 + rank % 3) for _ in range(2)]
    for (start, _), scale in zip(RANGES, (1.0, 1e-6, 1e4), strict=True):
        for step in steps:
            step[start:] *= scale
    return steps


@pytest.mark.parametrize("clip", [2.5, None, 1.0])
@pytest.mark.parametrize("ranks", RANKS)
def test_equals_the_reference(ranks: int, clip: float | None) -> None:
    everyone = trips(TernGradShared(clip), LAYOUT, vectors, ranks)
    for step in range(2):
        limits = [reference.terngrad_limits(done[step].before.numpy(), clip, RANGES) for done in everyone]
        scales = [float(np.float32(max(each))) for each in zip(*limits, strict=True)]
        sums = np.zeros(LAYOUT.numel)
        unsure = np.zeros(LAYOUT.numel, bool)
        each_scale = np.concatenate([np.full(stop - start, s) for (start, stop), s in zip(RANGES, scales, strict=True)])
        for rank, done in enumerate(everyone):
            exact = reference.terngrad_chances(done[step].before.numpy(), limits[rank], scales, RANGES, mix(step, rank))
            unsure |= np.abs(exact - np.round(exact)) <= 1e-5
            sums += np.floor(exact)
            left = done[step].before.double().numpy() - np.floor(exact) * each_scale
            np.testing.assert_allclose(done[step].after.numpy()[~unsure], left[~unsure], rtol=1e-5, atol=1e-9)
        assert unsure.mean() < 0.02
        wanted = sums * each_scale / ranks
        for done in everyone:
            assert torch.equal(done[step].mean, everyone[0][step].mean)
            np.testing.assert_allclose(done[step].mean.numpy()[~unsure], wanted[~unsure], rtol=1e-6)
            assert (done[step].carried == sum(rank + 0.5 for rank in range(ranks))).all()


@pytest.mark.parametrize("ranks", RANKS)
def test_the_sum_is_that_of_whole_numbers_exactly(ranks: int) -> None:
    """With scales of 1 what a rank sent is known exactly; extremes on all ranks at once would show any carry."""

    def ones(rank: int) -> list[torch.Tensor]:
        vector = torch.rand(LAYOUT.numel, generator=torch.Generator().manual_seed(rank)) * 2 - 1
        vector[::3], vector[1::5], vector[2::7] = 1.0, -1.0, 0.0
        return [vector]

    everyone = [done[0] for done in trips(TernGradShared(None), LAYOUT, ones, ranks)]
    sent = [(done.before.double() - done.after.double()).round() for done in everyone]
    sums = torch.stack(sent).sum(0)
    assert sums.max() == ranks
    assert sums.min() == -ranks
    assert torch.equal(everyone[0].mean, sums.float() * torch.tensor(1.0).div(ranks))


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes(ranks: int) -> None:
    digits = {1: 19, 2: 13, 3: 11, 4: 9, 5: 8, 16: 6, 31: 5}[ranks]
    words = -(-LAYOUT.numel // digits)
    for done in trips(TernGradShared(), LAYOUT, vectors, ranks):
        wanted = sum(all_reduce_bytes(4 * numbers, ranks) for numbers in (3, words, 3))
        assert done[0].sent == done[1].sent == done[0].promised == wanted


def test_several_runs_and_nothing_carried() -> None:
    layout = Layout.of([("a", (RUN + 1000,)), ("b", (77,))])

    def large(rank: int) -> list[torch.Tensor]:
        return [torch.randn(layout.numel, generator=torch.Generator().manual_seed(rank))]

    everyone = [done[0] for done in trips(TernGradShared(), layout, large, 3, carried=0)]
    total = sum(done.before.double() for done in everyone)
    kept = sum(done.after.double() for done in everyone)
    assert (3 * everyone[0].mean.double() + kept - total).abs().max() <= 1e-5
    assert everyone[0].sent == everyone[0].promised


def test_right_on_average_with_noise_of_its_own_on_every_rank() -> None:
    same = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(5))
    draws = 200
    one, eight = (trips(TernGradShared(None), LAYOUT, lambda _: [same] * draws, ranks)[0] for ranks in (1, 8))
    errors = [sum(float((each.mean - same).square().sum()) for each in done) / draws for done in (one, eight)]
    assert errors[1] == pytest.approx(errors[0] / 8, rel=0.05)
    mean = sum(each.mean.double() for each in eight) / draws
    assert (mean - same).square().sum() <= 1.3 * errors[1] / draws


def test_ranks_without_a_gradient_and_silence() -> None:
    def some(rank: int) -> list[torch.Tensor]:
        vector = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(rank)) * (rank == 1)
        vector[RANGES[2][0] :] = 0
        return [vector, torch.zeros(LAYOUT.numel), torch.full((LAYOUT.numel,), 1e-35)]

    for done in trips(TernGradShared(), LAYOUT, some, 3):
        assert done[0].mean[: RANGES[0][1]].any()
        assert not done[0].mean[RANGES[2][0] :].any()
        assert not done[1].mean.any()
        assert not done[2].mean.any()
        assert torch.equal(done[2].after, done[2].before)


def test_sums_never_run_over_and_too_many_ranks_are_refused() -> None:
    for ranks in [*range(1, 200), 1024, 4096, 23_169]:
        digits = digits_of(ranks)
        largest = sum(2 * ranks * (2 * ranks + 1) ** place for place in range(digits))
        assert largest <= 2**31 - 1 < (2 * ranks + 1) ** (digits + 1)
    with pytest.raises(ValueError, match=r"23170 ranks are too many.*use compressor='terngrad'"):
        digits_of(23_170)


def test_bad_clip() -> None:
    with pytest.raises(ValueError, match=r"TernGradShared\(clip=0\).*try 2\.5"):
        TernGradShared(0)
