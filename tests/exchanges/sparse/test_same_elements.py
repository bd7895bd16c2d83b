"""Exact sparse exchanges apply what the ranks selected, whatever the exchange and the number of ranks."""

from functools import cache

import pytest
import torch

from lightning_compress.codecs import Codec, TopK
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.atomo import ATOMO
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import EXCHANGES
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.choose import Auto
from tests.cases import CASES
from tests.test_laws import CPU, DENSE, LARGE, group_plan
from tests.turns import by_turns

EXACT = ["split_gather", "recursive_doubling", "butterfly", "run_length", "auto"]
SELECTIVE = {
    case.name: case.codec
    for case in CASES
    if isinstance(case.codec, Codec) and case.codec.sparse and not isinstance(case.codec, ATOMO)  # of no elements
}
GRID = 2.0**-6
"""Data are few multiples of it, so that sums of what arrives as it is are exact in any order."""


def vector(rank):
    """Different on every rank, large in other places on each, and larger at the beginning, as embeddings are."""
    generator = torch.Generator().manual_seed(rank)
    numel = DENSE.numel + LARGE.numel
    noise = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).square()
    return (64 * noise * torch.linspace(4, 1, numel)).round() * GRID


@cache
def averaged(codec, exchange, size):
    """Of each rank, what is left and the mean."""

    def rank(collective):
        plan = group_plan(codec, exchange, collective, Meter(CPU))
        left = vector(collective.rank)
        mean = torch.full_like(left, 7.0)
        plan.mean(left, mean, 5, torch.tensor(0.0))
        return left, mean

    return run_threads(size, rank)


@pytest.mark.parametrize(("name", "size"), by_turns(SELECTIVE, take=1))
def test_exact_exchanges_apply_the_same_elements(name, size):
    codec = SELECTIVE[name]
    wanted = averaged(codec, "all_gather", size)
    sent = torch.stack([vector(rank) - left for rank, (left, _) in enumerate(wanted)])
    assert 0 < sent[:, DENSE.numel :].count_nonzero() < sent[:, DENSE.numel :].numel()
    whole = bool((sent / GRID == (sent / GRID).round()).all()) and size & (size - 1) == 0
    for exchange in EXACT:
        for (left, mean), (wanted_left, wanted_mean) in zip(averaged(codec, exchange, size), wanted, strict=True):
            assert left.equal(wanted_left), exchange  # so the same was sent, bit for bit
            if whole:
                assert mean.equal(wanted_mean), exchange
            else:  # thirds, and values that are no multiples of the grid, round in the order in which they are added
                torch.testing.assert_close(mean, wanted_mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_the_same_where_ranks_select_the_same(size):
    codec = RandomK(0.05)
    for exchange in ["recursive_doubling", "butterfly", "run_length"]:
        for found, wanted in zip(averaged(codec, exchange, size), averaged(codec, "all_gather", size), strict=True):
            assert found[0].equal(wanted[0])
            torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-6)


ROWS = Layout.of([("embedding", (4000, 16))])


def hot_rows(rank):
    """A gradient of an embedding whose rows are used as words are, by the law of Zipf."""
    generator = torch.Generator().manual_seed(rank)
    common = torch.randn(4000, 16, generator=torch.Generator().manual_seed(99))  # so that ranks select alike
    used = torch.multinomial(1 / torch.arange(1.0, 4001.0), 2048, replacement=True, generator=generator)
    rows = common[used] + torch.randn(2048, 16, generator=generator)
    gradient = torch.zeros(4000, 16).index_add_(0, used, rows)
    return gradient.flatten()


def kept_of_hot_rows(exchange, codec, size):
    """Of each rank, the share of the energy that was sent; and bytes of the first."""

    def rank(collective):
        meter = Meter(CPU)
        world = World(CountingCollective(collective, meter), CPU, meter)
        plan = exchange.plan([Section(codec, ROWS, 0)], world)
        before = hot_rows(collective.rank)
        left, mean = before.clone(), torch.empty_like(before)
        plan.mean(left, mean, 5, torch.tensor(0.0))
        return float(1 - left.square().sum() / before.square().sum()), meter.bytes_sent

    found = run_threads(size, rank)
    return [share for share, _ in found], found[0][1]


@pytest.mark.parametrize("scope", ["parameter", "group"])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_hot_rows_are_shared_out_and_lose_nothing(size, scope):
    codec = TopK(0.01, scope=scope)
    wanted, most = kept_of_hot_rows(EXCHANGES["all_gather"](), codec, size)
    found, sent = kept_of_hot_rows(EXCHANGES["split_gather"](), codec, size)
    assert found == wanted
    assert sent < 1.1 * most  # though all of it is in the first of as many stretches of equal length


def test_links_do_not_change_what_is_selected():
    chosen = [
        kept_of_hot_rows(Auto("never", {"latency_s": latency, "bytes_per_s": 1e7}), TopK(0.01), 8)
        for latency in (1e-7, 1e-1)
    ]
    assert chosen[0][0] == chosen[1][0]
    assert chosen[0][1] != chosen[1][1]  # by another exchange
