"""The elements whose momentum is largest."""

import re

import numpy as np
import pytest
import torch

from lightning_compress.collectives import LocalCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.reducers.adam_mask import AdamMask
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits
from lightning_compress.core.state import State
from lightning_compress.settings.parsing import build_compressor
from tests.corrections.helpers import gradient, named, walk
from tests.reducers.helpers import CPU, trips
from tests.reference.adam_mask import simulate_adam_mask

NUMEL, STEPS = 3001, 20


def drawn_by(count):
    def drawn(step):
        starts = np.arange(count) * NUMEL // count
        lengths = (np.arange(count) + 1) * NUMEL // count - starts
        words = RandomBits(4 * count, CPU).draw(step, 0, 4 * count).numpy().view(np.uint64)
        return starts + ((words >> np.uint64(33)).astype(np.int64) * lengths >> 31)

    return drawn


def steps_of(method, gradients, rest):
    """Means of every step and the residual on every rank, fed back as the engine does."""

    def program(collective):
        layout = Layout.of([("weight", (NUMEL,))])
        state = State(layout, CPU, holder="shared")
        plan = method.plan(layout, 1, World(collective, CPU, Meter(CPU)), {"moment": state})
        left, means = torch.zeros(NUMEL), []
        for step, ranks in enumerate(gradients):
            vector, mean, flag = ranks[collective.rank] + left, torch.empty(NUMEL), torch.ones(1)
            plan.mean(vector, mean, flag, step)
            assert flag == collective.size
            state.touch()
            state.commit(torch.tensor(False), layout.names)
            left = vector if rest == "residual" else left
            means.append(mean)
        return means, left

    return run_threads(len(gradients[0]), program)


@pytest.mark.parametrize("rest", ["residual", "moment"])
@pytest.mark.parametrize("size", [3, 4])
def test_it_is_the_slow_one(size, rest):
    draw = torch.Generator().manual_seed(size)
    gradients = [[torch.randn(NUMEL, generator=draw) for _ in range(size)] for _ in range(STEPS)]
    count = -(-NUMEL // 10)
    arrays = [[each.numpy() for each in ranks] for ranks in gradients]
    means, residuals = simulate_adam_mask(arrays, count, 0.8, drawn_by(round(0.2 * count)), rest)
    for (mine, left), residual in zip(steps_of(AdamMask(0.1, 0.2, rest, 0.8), gradients, rest), residuals, strict=True):
        for found, slow in zip(mine, means, strict=True):
            assert np.abs(found.numpy() - slow).max() <= 1e-5
        assert np.abs(left.numpy() - residual).max() <= 1e-5
        assert left.any() == (rest == "residual")


def test_traffic_does_not_grow_with_the_ranks():
    layout = Layout.of([("weight", (NUMEL,))])
    sent = {}
    for size in (2, 4, 8):
        made = trips(AdamMask(), layout, lambda rank: [torch.ones(NUMEL), torch.ones(NUMEL)], size, carried=0)
        sent[size] = made[0][1].sent / (2 * (size - 1) / size)
    assert max(sent.values()) <= 1.01 * 4 * np.ceil(0.02 * NUMEL)


def test_one_of_few_is_drawn():
    given = torch.full((NUMEL,), 0.01)
    given[:4] = 1.0
    method = AdamMask(density=0.001, explore=0.1)  # 4 elements, a tenth of which is less than half of one
    means, _ = steps_of(method, [[given, given]] * 10, "residual")[0]
    assert all(mean[4:].any() and mean[:4].count_nonzero() >= 3 for mean in means[1:])


def test_everything_is_sent_again_where_the_moment_began_again():
    layout = Layout.of([("weight", (NUMEL,))])
    state = State(layout, CPU, holder="shared")
    plan = AdamMask(density=0.1).plan(layout, 0, World(LocalCollective(), CPU, Meter(CPU)), {"moment": state})
    sent = []
    for step in range(5):
        if step == 3:
            state.reset()
        mean = torch.empty(NUMEL)
        plan.mean(torch.ones(NUMEL), mean, torch.empty(0), step)
        state.touch()
        state.commit(torch.tensor(False), layout.names)
        sent.append(int(mean.count_nonzero()))
    assert sent == [NUMEL, 301, 301, NUMEL, 301]


def test_everything_is_sent_after_a_first_step_of_two_passes_that_was_rejected():
    layout = Layout.of([("weight", (NUMEL,))])
    state = State(layout, CPU, holder="shared")
    plan = AdamMask(density=0.1).plan(layout, 0, World(LocalCollective(), CPU, Meter(CPU)), {"moment": state})
    for rejected in (None, True, False):
        mean = torch.empty(NUMEL)
        plan.mean(torch.ones(NUMEL), mean, torch.empty(0), 1)
        assert mean.count_nonzero() == NUMEL
        state.touch()
        if rejected is not None:
            state.commit(torch.tensor(rejected), layout.names)


def test_what_is_never_large_is_still_sent():
    """An element whose moment is 0 is drawn some time."""
    means, _ = walk(2, AdamMask(density=0.1, explore=0.5), 60, _quiet, exchange="auto", min_numel=1)
    later = sum(named(each)["linear"][:100].abs() for each in means[1:])
    assert (later > 0).float().mean() > 0.5


def _quiet(rank, step):
    values = gradient(rank, step)
    if step == 0:
        named(values)["linear"][:100] = 0
    return values


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.0}, "density must be in (0, 1]"),
        ({"explore": 1.5}, "explore must be in [0, 1]"),
        ({"beta": 1.0}, "beta must be in [0, 1)"),
        ({"rest": "nothing"}, "rest must be one of 'residual', 'moment'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_compressor({"name": "adam_mask", **settings})
