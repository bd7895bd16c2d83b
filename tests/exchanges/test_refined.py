"""Sums of messages are encoded by a codec of their own."""

from dataclasses import asdict, replace

import pytest
import torch

from lightning_compress.codecs import FFT, QSGD, OneBit, RangeFloat, Rotated
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.contrib.exchanges.binomial import Binomial
from lightning_compress.contrib.exchanges.chain import Chain
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import Hierarchical, TwoShot
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.nodes import Cluster
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.link import kind_of
from tests.exchanges.test_exchanges import check

CPU = torch.device("cpu")

SUMS = {  # qsgd with 4 bits, its sums at 4 and 8 ranks with 5 and 6
    TwoShot(): lambda ranks: (ranks - 1) / ranks * (4 + {4: 5, 8: 6}[ranks]),
    TwoShot(sums="same"): lambda ranks: (ranks - 1) / ranks * (4 + 4),
    TwoShot(sums={"name": "rotated", "bits": 8}): lambda ranks: (ranks - 1) / ranks * (4 + 8),
    Binomial(): lambda ranks: (ranks - 1).bit_length() * {4: 5, 8: 6}[ranks],  # the root, down
    Binomial(sums="same"): lambda ranks: (ranks - 1).bit_length() * 4,
}


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("exchange", SUMS, ids=repr)
def test_how_many_bits_sums_take_is_an_option(exchange, size):
    numel = 1 << 16
    sections = [Section(QSGD(bucket=1024), Layout.of([("matrix", (256, 256))]), 0)]

    def sent(collective):
        meter = Meter(CPU)
        plan = exchange.plan(sections, World(CountingCollective(collective, meter), CPU, meter))
        vector = torch.randn(numel, generator=torch.Generator().manual_seed(collective.rank))
        plan.mean(vector, torch.empty(numel), 5, torch.tensor(0.0))
        assert meter.bytes_sent == plan.cost.bytes_sent
        return plan.cost.bytes_sent

    assert 8 * run_threads(size, sent)[0] / numel == pytest.approx(SUMS[exchange](size), rel=0.03)


@pytest.mark.parametrize("codec", [QSGD(), TernGrad(), FFT(), OneBit()], ids=repr)
@pytest.mark.parametrize(
    "exchange",
    [TwoShot(), Binomial(), Hierarchical("two_shot", 2), TwoShot(sums="rotated"), Binomial(sums="qsgd")],
    ids=repr,
)
def test_one_message_of_several_methods(exchange, codec):
    first, second = Layout.of([("embedding", (70, 30))]), Layout.of([("linear", (101, 67))])
    sections = [Section(RandomK(0.3), first, 0), Section(codec, second, first.numel)]

    def mean(collective):
        plan = exchange.plan(sections, World(collective, CPU, Meter(CPU)))
        before = torch.randn(sections[-1].stop, generator=torch.Generator().manual_seed(collective.rank))
        after, out = before.clone(), torch.full_like(before, 7.0)
        plan.mean(after, out, 5, torch.tensor(0.0))
        return before, after, out

    ranks = run_threads(4, mean)
    check(ranks)
    if getattr(exchange, "sums", "refined") == "refined":  # the same elements in either stage
        assert ((ranks[0][2][: first.numel] != 0).float().mean() - 0.3).abs() < 0.01


@pytest.mark.parametrize("sums", ["topk", "randomk", {"name": "rotated", "bits": 4, "depth": 1}, TernGrad])
def test_what_cannot_encode_sums_is_refused(sums):
    with pytest.raises(ValueError, match=r"TwoShot\(sums="):
        TwoShot(sums=sums)


@pytest.mark.parametrize(
    "exchange", [TwoShot(sums="onebit"), Binomial(sums="fft"), Hierarchical(TwoShot(sums="onebit"), 2)]
)
def test_biased_sums_need_a_residual(exchange):
    section = Section(Rotated(), Layout.of([("weight", (64, 64))]), 0, fed_back=False)

    def plan(collective):
        with pytest.raises(ValueError, match=r"sums=.*would be lost, because Rotated.* runs without error feedback"):
            exchange.plan([section], World(collective, CPU, Meter(CPU)))
        exchange.plan([replace(section, fed_back=True)], World(collective, CPU, Meter(CPU)))

    run_threads(4, plan)


def test_auto_knows_what_encoding_sums_costs():
    """TernGrad's are encoded by QSGD, which is pretended to be slow."""
    usual = [2e-9, 1e-9, 0.0]
    first, sums = kind_of(TernGrad()), kind_of(TernGrad().refined(8))
    speeds = {"Dense": [4e-10, 4e-10, 0.0], first: usual, sums: usual}
    cluster = run_threads(8, lambda collective: asdict(Cluster.of(collective, CPU)))[0]
    measured = {"cluster": cluster, "links": {"ranks": [1e-4, 1e8]}, "speeds": speeds, "node_size": 1}
    sections = [Section(TernGrad(), Layout.of([("matrix", (1024, 1024))]), 0)]

    def chosen(speed):
        exchange = Auto("never").with_measurements(measured | {"speeds": speeds | {sums: speed}})
        plans = run_threads(8, lambda collective: exchange.plan(sections, World(collective, CPU, Meter(CPU))))
        assert len({plan.description for plan in plans}) == 1
        return plans[0].description

    assert chosen(usual) == "two_shot"
    assert chosen([2e-7, 1e-7, 0.0]) == "all_gather"


@pytest.mark.parametrize("exchange", [TwoShot(), Hierarchical("two_shot", 2), Chain("two_shot", 2)], ids=repr)
def test_sums_of_a_biased_method_are_precise_between_nodes_too(exchange):
    """Where no residual makes up for it (LoCo, or none): 4 bits, and not one."""
    section = Section(OneBit(), Layout.of([("matrix", (256, 256))]), 0, precise=True)

    def mean(collective):
        vector = torch.randn(section.stop, generator=torch.Generator().manual_seed(collective.rank))
        plan, out = exchange.plan([section], World(collective, CPU, Meter(CPU))), torch.empty(section.stop)
        plan.mean(vector, out, 5, torch.tensor(0.0))
        return out

    assert len(run_threads(8, mean)[0][:64].unique()) > 4


@pytest.mark.parametrize(("codec", "least"), [(RangeFloat(bits=32), 1e-6), (RangeFloat(bits=8), 0.03)])
def test_sums_are_never_encoded_more_coarsely_than_messages(codec, least):
    section = Section(codec, Layout.of([("matrix", (256, 256))]), 0, precise=True)

    def mean(collective):
        vector = torch.randn(section.stop, generator=torch.Generator().manual_seed(collective.rank))
        plan, out, own = (
            TwoShot().plan([section], World(collective, CPU, Meter(CPU))),
            torch.empty(section.stop),
            vector.clone(),
        )
        plan.mean(vector, out, 5, torch.tensor(0.0))
        return own, out

    ranks = run_threads(4, mean)
    wanted = sum(own for own, _ in ranks) / 4
    assert (ranks[0][1] - wanted).norm() < least * wanted.norm()
