"""Thresholds that are used again, regions of equal load, and what comes back."""

import math

import numpy as np
import pytest
import torch

from lightning_compress.codecs import Dense, TopK
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.exchanges.ok_topk import OkTopK
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.exchanges.message import Section
from tests.corrections.helpers import COMPRESSED, named, walk
from tests.reference import sparse_sums
from tests.strategies.test_resume import interrupted

CPU = torch.device("cpu")
LAYOUT = Layout.of([("weight", (61, 67))])
SOUND = torch.tensor(False)


def gradient(rank, step, layout=LAYOUT):
    """Different on every rank; larger at the beginning, so that equal stretches would not be equally loaded."""
    scale = torch.linspace(3, 0.2, layout.numel)
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(1000 * step + rank)) * scale


def steps(size, exchange, codec, count, layout=LAYOUT, dense=0, make=gradient, feedback=True):
    """Steps with error feedback on every rank: before, after, mean, bytes; and the plan."""

    def program(ranks):
        meter = Meter(CPU)
        sections = [Section(Dense(), layout.cut(0, dense), 0), Section(codec, layout.cut(dense, layout.numel), dense)]
        states = {
            name: State(each.layout, CPU, holder=each.holder) for name, each in exchange.keeper.state(layout).items()
        }
        plan = exchange.plan(sections, World(CountingCollective(ranks, meter), CPU, meter), states)
        residual, told = torch.zeros(layout.numel), []
        for step in range(count):
            vector = make(ranks.rank, step, layout) + residual
            before, out, counted = vector.clone(), torch.full_like(vector, 7.0), meter.bytes_sent
            plan.mean(vector, out, step, torch.tensor(0.0))
            for state in states.values():
                state.touch()
                state.commit(SOUND, layout.names)
            residual = vector * feedback
            told.append((before, vector, out, meter.bytes_sent - counted))
        return told, plan, {name: state.committed for name, state in states.items()}

    return run_threads(size, program)


def sent(before, codec):
    """What a rank selects, as a dictionary."""
    left = before.clone()
    plan = codec.plan(LAYOUT, CPU)
    message = torch.zeros(plan.message_size, dtype=torch.uint8)
    plan.encode(left, message, 0)
    numbers = (before - left).numpy()
    return {int(place): numbers[place] for place in np.flatnonzero(numbers)}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("density", [0.01, 0.1])
def test_it_is_the_slow_one(size, density):
    codec, slow = TopK(density), sparse_sums.OkTopk(4, 6)
    ranks = steps(size, OkTopK(4, 6), codec, 14)
    for step in range(14):
        before = [told[step][0] for told, *_ in ranks]
        kept, back = slow.step([sent(each, codec) for each in before], LAYOUT.numel)
        mean = np.zeros(LAYOUT.numel, np.float32)
        mean[list(kept)] = list(kept.values())
        mean *= np.float32(1 / size)
        for rank, (told, plan, _) in enumerate(ranks):
            assert np.array_equal(told[step][2].numpy(), mean)
            left = before[rank].numpy().copy()
            for place in sent(before[rank], codec).keys() - back[rank].keys():
                left[place] = 0
            assert np.array_equal(told[step][1].numpy(), left)
            assert step != 13 or plan._memory.bounds(size) == slow.bounds(size)
    assert all(float(states["threshold"]) == slow.threshold for *_, states in ranks)


def test_mass_stays_where_it_was_not_applied():
    ranks = steps(5, OkTopK(8, 8), TopK(0.05), 20, dense=300)
    for step in range(20):
        rows = [told[step] for told, *_ in ranks]
        total = sum(before.double() for before, *_ in rows)
        after = sum(after.double() for _, after, *_ in rows)
        assert (5 * rows[0][2].double() + after - total).abs().max() <= 1e-5
        assert not any(after[:300].any() for _, after, *_ in rows)  # what is dense stays whole
        assert all(row[2].equal(rows[0][2]) for row in rows)


def test_regions_bear_equal_loads():
    ranks = steps(4, OkTopK(), TopK(0.05), 1)
    before = [told[0][0] for told, *_ in ranks]
    memory = ranks[0][1]._memory
    memory.carry()  # what was committed
    bounds = memory.bounds(4)
    loads = np.histogram([place for each in before for place in sent(each, TopK(0.05))], bounds)[0]
    even = np.histogram([place for each in before for place in sent(each, TopK(0.05))], 4)[0]
    assert max(loads) <= 1.25 * min(loads), loads  # of 205 each on average; within a part they are not even
    assert max(even) > 2 * min(even)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_traffic_between_exact_thresholds_is_the_formula(size):
    layout = Layout.of([("weight", (1 << 10, 1 << 9))])
    flat = lambda rank, step, _: torch.randn(  # noqa: E731
        layout.numel, generator=torch.Generator().manual_seed(100 * step + rank)
    )
    ranks = steps(size, OkTopK(), TopK(0.01, "group"), 4, layout, make=flat, feedback=False)
    told, plan, _ = ranks[0]
    k = math.ceil(0.01 * layout.numel)
    for step in (1, 2, 3):
        applied = int(told[step][2].count_nonzero())
        assert 0.5 * k <= applied <= 1.6 * k  # the threshold of a step before
        per_sum = plan.cost.bytes_sent / (2 * k)  # half of the formula is for what is kept, of which it expects k
        assert told[step][3] == pytest.approx(per_sum * (k + applied), rel=0.03)
    assert told[0][3] > (1.2 if size > 2 else 1.0) * told[2][3]  # all sums, for an exact threshold
    # 4 k (W - 1) / W words, and the most of many draws
    assert plan.cost.bytes_sent <= 1.2 * 4 * 4 * k * (size - 1) / size


def test_volume_does_not_grow_with_the_ranks():
    sizes = {size: steps(size, OkTopK(), TopK(0.05), 2)[0][0][1][3] for size in (4, 16)}
    assert sizes[16] < 2 * sizes[4]  # small messages, of which heads are a part; a gather's grow five times


def test_the_threshold_follows_what_is_kept():
    def thresholds(make):
        return [float(steps(3, OkTopK(), TopK(0.05), n, make=make)[0][2]["threshold"]) for n in (1, 2, 4)]

    first, _, later = thresholds(lambda rank, step, layout: gradient(rank, step, layout) * 0.3**step)
    assert later == pytest.approx(first / 1.008**3, rel=1e-5)
    first, second, later = thresholds(lambda rank, step, layout: gradient(rank, step, layout) * 10**step)
    assert second == pytest.approx(10 * first, rel=0.1)  # at once
    assert later == pytest.approx(1000 * first, rel=0.1)


def test_momentum_is_forgotten_where_it_was_applied():
    """With DGC: an element that was sent and not kept keeps its velocity and comes again."""
    size = 4
    out, walkers = walk(size, {"name": "dgc", "density": 0.05}, 3, exchange="ok_topk")
    for walker in walkers:
        velocity, residual = walker.state("velocity"), walker.state("residual")
        for name in COMPRESSED:
            assert ((velocity[name] == 0) == (residual[name] == 0)).all()
    applied = named(out[-1])
    for name in COMPRESSED:
        assert all((applied[name][walker.state("residual")[name] == 0] != 0).all() for walker in walkers)


def _interrupted(folder):
    return interrupted(folder, "topk", exchange={"name": "ok_topk", "evaluate_every": 3, "rebalance_every": 4})


def test_a_resumed_run_goes_on_exactly(pools, tmp_path):
    assert all(same for same, _ in pools[3].run(_interrupted, str(tmp_path)))


def test_dense_steps_leave_thresholds_alone():
    out, walkers = walk(3, "topk", 4, exchange="ok_topk", warmup_steps=2)
    assert all(set(walker.state("exchange.clock")[name].tolist()) == {2.0} for walker in walkers for name in COMPRESSED)
    assert all(walker.state("exchange.threshold")[name].min() > 0 for walker in walkers for name in COMPRESSED)
    assert len(out) == 4


@pytest.mark.parametrize("setting", ["evaluate_every", "rebalance_every"])
@pytest.mark.parametrize("value", [0, -1, True, 1001, 2.5, "32"])
def test_wrong_settings(setting, value):
    with pytest.raises(ValueError, match=rf"OkTopK\({setting}="):
        OkTopK(**{setting: value})
