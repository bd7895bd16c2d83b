"""Vectors that travel in parts have the means and residuals of those that travel whole."""

from unittest import mock

import pytest
import torch

from lightning_compress.codecs import OneBit, Rotated
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllGather, TwoShot, parts
from lightning_compress.exchanges.message import Section

CPU = torch.device("cpu")
LAYOUT = Layout.of([("first", (70, 100)), ("second", (33, 64)), ("third", (129,))])


def averaged(ranks, exchange, codec, part, spoilt=None):
    """Of each rank: the mean, what was not sent, the vector before, the flag, and bytes counted and promised."""

    def program(collective):
        meter = Meter(CPU)
        world = World(CountingCollective(collective, meter), CPU, meter)
        plan = exchange.plan([Section(codec, LAYOUT, 0)], world)
        vector = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(collective.rank))
        before, mean = vector.clone(), torch.empty(LAYOUT.numel)
        flag = torch.tensor(torch.nan if collective.rank == spoilt else 0.0)
        plan.mean(vector, mean, 7, flag)
        return mean, vector, before, flag, meter.bytes_sent, plan.cost.bytes_sent

    with mock.patch.multiple(parts, PART=part, BYTES=64):
        return run_threads(ranks, program)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("exchange", [AllGather(), TwoShot(), TwoShot(sums="same")])
def test_signs_are_the_same_bits(ranks, exchange):
    codec = OneBit(block=64)
    whole, cut = (averaged(ranks, exchange, codec, part) for part in (LAYOUT.numel, 1024))
    for one, several in zip(whole, cut, strict=True):
        assert several[4] > one[4]  # each part has a header
        assert torch.equal(one[0], several[0])
        assert torch.equal(one[1], several[1])


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("exchange", [AllGather(), TwoShot()])
def test_random_rounding_conserves_and_is_alike_on_all_ranks(ranks, exchange):
    found = averaged(ranks, exchange, Rotated(block=64), 1024)
    for mean, _, before, flag, counted, promised in found:
        assert torch.equal(mean, found[0][0])
        assert counted == promised
        assert float(flag) == 0.0
        assert before.isfinite().all()
    exact = sum(before for _, _, before, *_ in found) / ranks
    assert (found[0][0] - exact).norm() < 0.35 * exact.norm()


@pytest.mark.parametrize("exchange", [AllGather(), TwoShot()])
def test_a_flag_reaches_every_rank(exchange):
    assert all(flag.isnan() for _, _, _, flag, *_ in averaged(3, exchange, OneBit(block=64), 1024, spoilt=1))
