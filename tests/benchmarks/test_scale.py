"""The simulated network sends what real ranks send."""

from itertools import pairwise

import pytest
import torch

from benchmarks._scale import prediction as scale
from benchmarks._scale.simulated import Call, Cluster, longer
from lightning_compress.codecs import OneBit
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllGather
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.cost import COPIES, Link

CPU = torch.device("cpu")
WAYS = scale.WAYS | {"onebit, all_gather": scale.Way(OneBit(), AllGather())}
CARD = Link(1e-3, 1e6)


def really_sent(way, numel, ranks, node_size):
    """Bytes counted by the ranks."""

    def rank(collective):
        meter = Meter(CPU)
        section = Section(way.codec, Layout.of([("weight", (numel // 1024, 1024))]), 0)
        plan = way.on(node_size).plan([section], World(CountingCollective(collective, meter), CPU, meter))
        before = meter.bytes_sent
        vector = torch.randn(numel, generator=torch.Generator().manual_seed(collective.rank))
        plan.mean(vector, torch.empty(numel), 1, torch.zeros(()))
        return meter.bytes_sent - before

    return run_threads(ranks, rank)


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("name", WAYS)
def test_bytes_and_rounds_are_those_of_real_ranks(name, ranks):
    way, node_size = WAYS[name], 2 if ranks % 2 == 0 else ranks
    if not way.fits(ranks, node_size):
        return
    sparse = way.codec is scale.SPARSE
    numel = 1024 * ranks * 32
    calls, counted, plan = scale.send(way, numel, ranks, node_size)
    assert sum(call.sent for call in calls) == counted
    assert sum(call.rounds for call in calls) == plan.cost.rounds
    real = really_sent(way, numel, ranks, node_size)
    if sparse:  # selections overlap by chance
        assert all(each == pytest.approx(counted, rel=0.05) for each in real)
        assert plan.cost.bytes_sent == pytest.approx(counted, rel=0.05)
    else:
        assert real == [counted] * ranks
        assert plan.cost.bytes_sent == counted


def test_a_longer_vector_is_on_the_line():
    way = scale.WAYS["rotated, two_shot"]
    calls = [scale.send(way, 4096 * length, 4, 1)[0] for length in (1, 2, 6)]
    found = longer(calls[0], calls[1], 6)
    assert [each.sent for each in found] == pytest.approx([each.sent for each in calls[2]], rel=0.01)
    with pytest.raises(ValueError, match="changes its mind"):
        longer(calls[0], calls[1][:1], 6)


def test_cards_are_shared():
    cluster = Cluster(CARD, Link(1e-4, 1e8), 8)
    flat = Call("all_to_all", 15_000, 16, 8)  # 15 rows of 1000 bytes, 8 of them to the other node, from each of 8 ranks
    assert flat.card_bytes(cluster) == 8 * 8 * 1000
    assert flat.seconds(cluster) == pytest.approx(15e-3 + 64e-3)
    ring = Call("all_reduce", 15_000, 16, 8)  # goes through the ranks of a node one by one, and leaves it once
    assert ring.card_bytes(cluster) == 15_000
    between = Call("all_gather", 1000, 2, 1)  # eight of them side by side
    assert between.card_bytes(cluster) == 8000
    within = Call("all_gather", 1000, 8, 8)
    assert not within.leaves
    assert within.seconds(cluster) == pytest.approx(3e-4 + 1e-5)
    alone = Call("all_to_all", 3000, 4, 1)
    assert alone.seconds(Cluster(CARD, CARD, 1)) == pytest.approx(3e-3 + 3e-3)


def test_growth_with_the_ranks():
    cluster = Cluster(Link(1e-5, 1.25e8), Link(1e-6, 1.25e9), 8)
    ranks = [8, 16, 64, 256]
    ways = {name: scale.WAYS[name] for name in ("onebit, two_shot", "topk 1 %, all_gather", "rotated, hierarchical")}
    found = {
        name: [scale.predict(way, 4_000_000, count, cluster, COPIES, 1e-10) for count in ranks if way.fits(count, 8)]
        for name, way in ways.items()
    }
    two_shot, gathered, nodes = found.values()
    assert two_shot[-1].bytes_sent < 1.3 * two_shot[0].bytes_sent
    assert gathered[-1].bytes_sent == pytest.approx(255 / 7 * gathered[0].bytes_sent, rel=0.01)
    flat = scale.predict(scale.WAYS["rotated, two_shot"], 4_000_000, 256, cluster, COPIES, 0.0)
    assert nodes[-1].card_bytes < 0.3 * flat.card_bytes
    for figures in found.values():
        assert all(low.seconds <= high.seconds for low, high in pairwise(figures))


def test_a_plot_is_drawn(tmp_path):
    cluster = Cluster(CARD, CARD, 2)
    way, found = scale.WAYS["rotated, two_shot"], {}
    for name in list(scale.WAYS)[2:5]:
        found[name] = {4: scale.predict(way, 1 << 20, 4, cluster, COPIES, 0.0)}
    from benchmarks._scale.plot import draw

    draw(found, "some", tmp_path / "some.png")
    assert (tmp_path / "some.png").stat().st_size > 5000


def test_a_vector_that_would_travel_in_parts_is_on_the_line():
    cluster = Cluster(CARD, CARD, 8)
    found = scale.predict(scale.WAYS["rotated, two_shot"], 10_000_000, 1024, cluster, COPIES, 1e-9)
    assert found.bytes_sent == pytest.approx(10e6 * (4 + 16) / 8, rel=0.01)  # so many ranks have sums in 16 bits
