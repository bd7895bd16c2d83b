"""Layers of any degrees, and steps in which values alone travel."""

import re

import numpy as np
import pytest
import torch

from lightning_compress import CompressedDDPStrategy
from lightning_compress.codecs import TopK
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.contrib.exchanges.butterfly import PACKET, Butterfly, chosen, factorings
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges.message import Section
from tests.fuzz.exchanging import Liar
from tests.reference import sparse_sums

CPU = torch.device("cpu")
LAYOUT = Layout.of([("conv", (16, 9, 3, 3)), ("linear", (61, 37)), ("odd", (3, 131))])


def gradient(rank, step, share=1.0):
    """Different on every rank and in every step; nonzero at places that only the rank says."""
    places = torch.rand(LAYOUT.numel, generator=torch.Generator().manual_seed(1000 + rank)) < share
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(100 * step + rank)) * places


def walk(size, degrees, gradients, codec, spoil=None):
    """Steps on every rank: sent, mean and bytes of each."""

    def program(ranks):
        meter, told = Meter(CPU), []
        liar = Liar(ranks, None) if spoil is None else spoil(ranks)
        plan = Butterfly(degrees).plan([Section(codec, LAYOUT, 0)], World(CountingCollective(liar, meter), CPU, meter))
        for step, each in enumerate(gradients):
            vector = each(ranks.rank).clone()
            before, out, counted = vector.clone(), torch.full_like(vector, 7.0), meter.bytes_sent
            try:
                plan.mean(vector, out, 5 if isinstance(codec, RandomK) else step, torch.tensor(0.0))
            except ValueError as error:
                out = str(error)
            told.append((before - vector, out, meter.bytes_sent - counted))
        return told

    return run_threads(size, program, timeout=30.0)


@pytest.mark.parametrize(
    ("size", "degrees"),
    [(2, (2,)), (3, (3,)), (4, (2, 2)), (6, (3, 2)), (6, (2, 3)), (8, (8,)), (8, (4, 2)), (8, (2, 2, 2)), (9, (3, 3))],
)
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
def test_it_is_the_slow_one(size, degrees, density):
    ranks = walk(size, degrees, [lambda rank: gradient(rank, 0)], TopK(density))
    parts = [{int(place): each[0][0].numpy()[place] for place in each[0][0].nonzero()} for each in ranks]
    expected = np.zeros(LAYOUT.numel, np.float32)
    for place, value in sparse_sums.butterfly(parts, degrees, LAYOUT.numel).items():
        expected[place] = value
    expected *= np.float32(1 / size)
    assert all(np.array_equal(each[0][1].numpy(), expected) for each in ranks)


@pytest.mark.parametrize("density", [0.02, 1.0])
def test_any_degrees_give_the_same(density):
    ways = [walk(8, each, [lambda rank: gradient(rank, 0)], TopK(density))[0][0][1] for each in factorings(8)]
    assert len(ways) == 3
    assert all((way - ways[0]).abs().max() <= 1e-6 for way in ways)


@pytest.mark.parametrize(("size", "degrees"), [(2, (2,)), (5, (5,)), (6, (3, 2)), (8, (2, 2, 2))])
@pytest.mark.parametrize("share", [0.02, 0.4, 1.0])
def test_values_alone_travel_while_places_stay(size, degrees, share):
    """Fixed masks, which differ from rank to rank; the fourth step has other ones."""
    masks = [lambda rank, step=step: gradient(rank, step, share) for step in range(3)]
    other = lambda rank: gradient(rank + (rank == 1) * 50, 3, share)  # noqa: E731  # of one rank only
    ranks = walk(size, degrees, [*masks, other], TopK(1.0, indices="rice"))
    fresh = [walk(size, degrees, [each], TopK(1.0, indices="rice"))[0][0] for each in [*masks, other]]
    for step in range(4):
        assert all(each[step][1].equal(fresh[step][1]) for each in ranks)  # whatever was remembered
    first, second, third, fourth = (sum(each[step][2] for each in ranks) for step in range(4))
    assert second == third
    if share < 1:
        assert second < (0.7 if share < 0.1 else 0.98) * first  # heads and tables are left
        assert fourth == pytest.approx(first, rel=0.1)


def test_a_part_of_the_places_is_enough():
    """Half of them and more: the others are sent as zeros."""

    def few(rank):
        vector = gradient(rank, 1, 0.1)
        vector[:1500] = 0
        return vector

    ranks = walk(4, (2, 2), [lambda rank: gradient(rank, 0, 0.1), few], TopK(1.0, indices="rice"))
    assert ranks[0][1][1].equal(walk(4, (2, 2), [few], TopK(1.0, indices="rice"))[0][0][1])
    assert ranks[0][1][2] < 0.9 * ranks[0][0][2]


def test_sparser_than_half_is_configured_anew():
    ranks = walk(4, (4,), [lambda rank: gradient(rank, 0), lambda rank: gradient(rank, 1, 0.05)], TopK(1.0))
    assert ranks[0][1][2] < 0.3 * ranks[0][0][2]


class Boaster(Liar):
    """Rank 0 says of the second step that its places stayed."""

    def __init__(self, inner):
        super().__init__(inner, None)
        self.rows = 0

    def all_gather(self, tensor, out):
        self.rows += 1
        if self.rank == 0 and self.rows == 5:  # 4 in the first step: a word, down, up, the end
            tensor = tensor.clone()
            tensor[0] |= 2
        super().all_gather(tensor, out)


def test_nobody_is_trusted_alone():
    changed = lambda rank: gradient(rank + 50 * (rank == 0), 1, 0.1)  # noqa: E731
    steps = [lambda rank: gradient(rank, 0, 0.1), changed, changed]
    ranks = walk(3, (3,), steps, TopK(1.0, indices="rice"), Boaster)
    assert all("damaged" in each[1][1] or "cannot read" in each[1][1] for each in ranks)
    assert all(each[2][1].equal(walk(3, (3,), [changed], TopK(1.0))[0][0][1]) for each in ranks)  # and goes on


@pytest.mark.parametrize("step", [0, 1])
def test_a_damaged_value_is_an_error_in_either_mode(step):
    class Late(Liar):
        def __init__(self, inner):
            super().__init__(inner, None)
            self.swaps = 0

        def swap(self, sends, receives):
            self.swaps += 1
            if self.rank == 2 and self.swaps == 2 * (1 + step):  # on the way up, to one rank
                peer = next(iter(sends))
                sends = {**sends, peer: sends[peer].clone()}
                sends[peer][40] ^= 1
            self.inner.swap(sends, receives)

    masks = [lambda rank, step=step: gradient(rank, step, 0.1) for step in range(3)]
    ranks = walk(3, (3,), masks, TopK(1.0, indices="rice"), Late)
    assert all(isinstance(each[step][1], str) for each in ranks)
    assert all(each[2][1].equal(ranks[0][2][1]) for each in ranks)


def test_degrees_follow_the_size_of_messages():
    assert chosen(8, lambda merged: 100 * PACKET) == (8,)
    assert chosen(8, lambda merged: 4 * PACKET / merged**0.5) == (4, 2)
    assert chosen(8, lambda merged: 10) == (2, 2, 2)
    assert chosen(30, lambda merged: 10) == (5, 3, 2)
    assert chosen(7, lambda merged: 10) == (7,)
    assert chosen(1, lambda merged: 10) == ()


def test_degrees_of_another_world_are_refused():
    words = re.escape("their product is 6, and there are 4 ranks; use one of: (4,); (2, 2), or null")
    with pytest.raises(ValueError, match=words):
        walk(4, (3, 2), [], TopK(0.1))


@pytest.mark.parametrize("degrees", [4, (0,), (2, True), (1, 4), ("2",), (2.0,)])
def test_wrong_degrees(degrees):
    with pytest.raises(ValueError, match=re.escape(f"Butterfly(degrees={degrees!r})")):
        Butterfly(degrees)


def test_degrees_by_name():
    exchange = {"name": "butterfly", "degrees": [2, 2]}
    assert CompressedDDPStrategy("topk", exchange=exchange) is not None
    assert Butterfly([2, 2]) == Butterfly((2, 2))
