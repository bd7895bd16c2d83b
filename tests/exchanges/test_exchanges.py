"""Exchanges at more ranks, in nodes, and on what they send where."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress import CompressedDDPStrategy
from lightning_compress.codecs import BF16, QSGD, Codec, Dense, OneBit, Rotated, TopK
from lightning_compress.collectives import CountingCollective, TorchCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.contrib.exchanges.chain import Chain
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllGather, AllReduce, Hierarchical, SplitGather, TwoShot, composite
from lightning_compress.exchanges.hierarchical import nodes_of
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.sparse import coding
from tests.helpers.training import train

CPU = torch.device("cpu")
LAYOUT = Layout.of([("conv", (16, 9, 9, 9)), ("linear", (101, 67)), ("odd", (3, 347))])


def kept(exchange, device=CPU):
    """State as before the first step."""
    return composite.new_states(exchange.keeper.state(LAYOUT) if exchange.keeper else {}, device)


def mean(collective, exchange, codec, seed=0, flag=0.0, device=CPU):
    """Before, after, mean, flag and plan of one mean of different data on every rank."""
    sections = [Section(Dense(), LAYOUT.cut(0, 100), 0), Section(codec, LAYOUT.cut(100, LAYOUT.numel), 100)]
    plan = exchange.plan(sections, World(collective, device, Meter(device)), kept(exchange, device))
    before = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed + collective.rank)).to(device)
    after, out, flags = before.clone(), torch.full_like(before, 7.0), torch.tensor(flag, device=device)
    plan.mean(after, out, 5, flags)
    return before, after, out, flags, plan


def check(ranks, tolerance=1e-6):
    total = sum(before.double() for before, *_ in ranks)
    kept = sum(after.double() for _, after, *_ in ranks)
    out = ranks[0][2]
    assert all(other[2].equal(out) for other in ranks)
    assert float((len(ranks) * out.double() + kept - total).abs().max()) <= tolerance * len(ranks) * float(
        total.abs().max()
    )


@pytest.mark.parametrize("size", [6, 8, 9, 16])
@pytest.mark.parametrize("codec", [TopK(0.01), TopK(0.2), TopK(0.02, values="fp16", indices="rice")], ids=repr)
def test_split_gather_at_many_ranks(size, codec):
    check(run_threads(size, lambda collective: mean(collective, SplitGather(), codec)))


def partly(collective, exchange, empty):
    """A mean in which some ranks have nothing."""
    section = Section(TopK(0.05), LAYOUT, 7)  # the vector has elements that are no section's
    plan = exchange.plan([section], World(collective, CPU, Meter(CPU)), kept(exchange))
    vector = torch.randn(LAYOUT.numel + 9, generator=torch.Generator().manual_seed(collective.rank))
    if collective.rank in empty:
        vector.zero_()
    before, out, flag = vector.clone(), torch.full_like(vector, 7.0), torch.tensor(0.0)
    plan.mean(vector, out, 5, flag)
    sent = before - vector
    return before, vector, out, flag, sent


NODES = [(2, 4), (2, 6), (3, 6), (4, 8), (2, 8), (3, 9), (4, 16)]


@pytest.mark.parametrize(("node", "size"), NODES)
@pytest.mark.parametrize("codec", [TopK(0.05), OneBit(), QSGD(), RandomK(0.05), BF16()], ids=repr)
def test_hierarchical_at_many_ranks(node, size, codec):
    rounding = 2**-7 if isinstance(codec, BF16) else 1e-6  # a cast owes what the transport's own sums round
    check(run_threads(size, lambda collective: mean(collective, Hierarchical(node_size=node), codec)), rounding)


@pytest.mark.parametrize("outer", ["all_gather", "two_shot", "split_gather", {"name": "two_shot"}, TwoShot()])
def test_what_goes_between_nodes(outer):
    codec = TopK(0.05)
    check(run_threads(8, lambda collective: mean(collective, Hierarchical(outer, 2), codec)))


@pytest.mark.parametrize("exchange", [Hierarchical("all_gather", 2), Chain("all_gather", 2)], ids=repr)
def test_what_is_no_section_is_left_alone(exchange):
    ranks = run_threads(4, lambda collective: partly(collective, exchange, {1}))
    for before, after, out, *_ in ranks:
        assert (out[:7] == 7).all()
        assert after[:7].equal(before[:7])
        assert after[7 + LAYOUT.numel :].equal(before[7 + LAYOUT.numel :])


def test_one_rank_of_a_node_keeps_what_was_not_sent():
    ranks = run_threads(4, lambda collective: mean(collective, Hierarchical("all_gather", 2), TopK(0.05)))
    left = torch.stack([after != 0 for _, after, *_ in ranks])
    assert left.any(dim=1).all()
    assert not (left[0] & left[1]).any()
    assert not (left[2] & left[3]).any()


@pytest.mark.parametrize("bad", [0, 3])
def test_a_flag_crosses_nodes(bad):
    flags = run_threads(
        4, lambda c: mean(c, Hierarchical(node_size=2), OneBit(), flag=math.nan if c.rank == bad else 0.0)[3]
    )
    assert all(flag.isnan() for flag in flags)


def test_ranks_of_a_node_share_what_crosses():
    """Between nodes, a rank of a node of 4 sends a quarter of what a rank alone would."""

    def between(collective, node):
        plan = Hierarchical("all_gather", node).plan([Section(OneBit(), LAYOUT, 0)], World(collective, CPU, Meter(CPU)))
        return plan.cost.bytes_sent - (2 * (node - 1) * 4 * (-(-LAYOUT.numel // node)) if node > 1 else 0)

    alone = run_threads(2, lambda collective: between(collective, 1))[0]
    shared = run_threads(8, lambda collective: between(collective, 4))[0]
    assert shared == pytest.approx(alone / 4, rel=0.25, abs=3 * 4 * 2 * 256)


def test_nodes_by_host_name():
    assert run_threads(3, lambda collective: nodes_of(collective, None, CPU)) == [[[0, 1, 2]]] * 3


def test_nodes_of_several_sizes_are_refused():
    with pytest.raises(ValueError, match="nodes of one size, but the 5 ranks are on nodes of 2, 2, 1"):
        run_threads(5, lambda collective: nodes_of(collective, 2, CPU))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"exchange": {"name": "hierarchical", "node_size": 0}}, "node_size=0"),
        ({"exchange": {"name": "hierarchical", "outer": "hierarchical"}}, "unknown exchange 'hierarchical'"),
        ({"exchange": {"name": "hierarchical", "outer": {"name": "two_shot", "adagrad": 1e-8}}}, "without adagrad"),
        ({"compressor": "dgc", "exchange": "hierarchical"}, "sums the gradients of a node"),
        ({"exchange": {"name": "hierarchical", "outer": "ok_topk"}}, "or keep state between"),
        ({"exchange": {"name": "hierarchical", "outer": "chain"}}, "must not use nodes itself"),
        ({"exchange": {"name": "hierarchical", "inner": "chain"}}, "no setting 'inner' any more.*'name': 'chain'"),
        ({"exchange": {"name": "chain", "outer": "auto"}}, "name the exchange between nodes, such as outer="),
        ({"compressor": "dgc", "exchange": "binomial"}, "leaves what ranks sent in the residuals of others"),
        (
            {"compressor": {"name": "randomk", "rescale": True}, "exchange": "binomial"},
            "would rescale them twice",
        ),
        ({"exchange": {"name": "ok_topk", "evaluate_every": 0}}, r"OkTopK\(evaluate_every=0\)"),
        ({"exchange": "gtopk"}, "exchange='gtopk' is gone: use 'ok_topk'"),
        ({"exchange": {"name": "gtopk"}}, "or 'split_gather', as 'auto' does"),
        ({"exchange": {"name": "hierarchical", "outer": "gtopk"}}, "is gone: use 'ok_topk'"),
        ({"compressor": "dgc", "exchange": "two_shot"}, "Use exchange='auto', or masking=False"),
        (
            {
                "compressor": {"name": "dgc", "density": 1.0},
                "exchange": "two_shot",
                "schedule": {"density": {0: 1.0, 10: 0.1}},
            },
            "leaves what ranks sent in the residuals of others",
        ),
        ({"compressor": "wangni", "exchange": "ok_topk"}, "drops the smaller sums, which only error feedback"),
        ({"compressor": "qsgd", "exchange": "recursive_doubling"}, "pays only for few elements"),
        ({"compressor": "onebit", "exchange": "split_gather"}, "pays only for few elements"),
        ({"compressor": "powersgd", "exchange": "hierarchical"}, "exchanges by itself"),
        ({"exchange": {"name": "two_shot", "sums": "finer"}}, r"TwoShot\(sums='finer'\): use 'refined'"),
        ({"exchange": {"name": "binomial", "sums": None}}, r"Binomial\(sums=None\): use 'refined'"),
    ],
)
def test_refused_at_construction(arguments, words):
    with pytest.raises(ValueError, match=words):
        CompressedDDPStrategy(**arguments)


@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_nonzeros_come_back(numel, share, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < share)
    message, out = torch.full((16 + 4 * numel + 32,), 255, dtype=torch.uint8), torch.full((numel,), 7.0)
    used = coding.write(values, message)
    coding.read(message[:used], out)
    assert torch.equal(out, values)
    count = int((values != 0).sum())
    assert used == 16 + min(8 * count, -(-numel // 32) * 4 + 4 * count, 4 * numel)
    assert (message[used:] == 255).all()


@pytest.mark.parametrize("count", [-1, 101, 2**31 - 1])
def test_a_damaged_count_is_refused(count):
    message = torch.zeros(16 + 400, dtype=torch.uint8)
    message[:4].view(torch.int32)[0] = count
    with pytest.raises(ValueError, match="damaged"):
        coding.read(message, torch.empty(100))


def test_places_beyond_the_end_are_refused():
    message = torch.zeros(16 + 8, dtype=torch.uint8)
    message[:4].view(torch.int32)[0] = 1
    message[16:20].view(torch.int32)[0] = 100
    with pytest.raises(ValueError, match="damaged"):
        coding.read(message, torch.empty(100))


def _over_sockets(exchange, codec):
    before, after, out, *_ = mean(TorchCollective(), exchange, codec)
    again = mean(TorchCollective(), exchange, codec)[2]  # the same process groups
    return before, after, out, out.equal(again)


@pytest.mark.parametrize("codec", [TopK(0.05), OneBit()], ids=repr)
def test_hierarchical_over_sockets(pools, codec: Codec):
    sockets = pools[4].run(_over_sockets, Hierarchical("all_gather", 2), codec)
    threads = run_threads(4, lambda collective: mean(collective, Hierarchical("all_gather", 2), codec))
    check(sockets)
    assert all(socket[3] for socket in sockets)
    assert all(socket[2].equal(thread[2]) for socket, thread in zip(sockets, threads, strict=True))
    assert all(socket[1].equal(thread[1]) for socket, thread in zip(sockets, threads, strict=True))


def _trains(exchange):
    return train("topk", 10, exchange=exchange)


@pytest.mark.parametrize(
    "exchange",
    [
        "split_gather",
        "recursive_doubling",
        "butterfly",
        {"name": "hierarchical", "node_size": 2},
        {"name": "chain", "node_size": 3, "outer": "binomial"},
    ],
)
def test_training(pools, exchange):
    ranks = pools[4].run(_trains, exchange)
    assert all((weights == ranks[0][0]).all() for weights, _ in ranks)


def _in_parts(codec, bad=None):
    numel = 5 * (1 << 19) + 77
    layout = Layout.of([("weight", (numel - 37,)), ("bias", (37,))])

    def program(collective):
        device = torch.device("cpu")
        meter = Meter(device)
        sections = [
            Section(codec, layout.cut(0, numel - 37), 0),
            Section(Dense(), layout.cut(numel - 37, numel), numel - 37),
        ]
        plan = AllReduce().plan(sections, World(CountingCollective(collective, meter), device, meter))
        vector = torch.randn(numel, generator=torch.Generator().manual_seed(collective.rank))
        before, out = vector.clone(), torch.empty(numel)
        flag = torch.tensor(torch.nan if collective.rank == bad else 0.0)
        plan.mean(vector, out, 5, flag)
        return before, vector, out, flag, plan.cost.calls, (plan.cost.bytes_sent, meter.bytes_sent)

    return program


def _check_parts(ranks, tolerance):
    total = sum(before.double() - left.double() for before, left, *_ in ranks)
    for _, _, out, flag, calls, (expected, counted) in ranks:
        assert calls == 2
        assert counted == expected
        assert flag == 0
        assert out.equal(ranks[0][2])
        torch.testing.assert_close(len(ranks) * out.double(), total, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("codec", "tolerance"), [(Dense(), 1e-6), (BF16(), 5e-2)], ids=["none", "bf16"])
@pytest.mark.parametrize("size", [2, 3])
def test_long_vectors_are_summed_in_parts(size, codec, tolerance):
    _check_parts(run_threads(size, _in_parts(codec)), tolerance)


def test_one_bad_rank_spoils_every_part():
    assert all(flag.isnan() for _, _, _, flag, *_ in run_threads(3, _in_parts(BF16(), bad=1)))


def _parts_over_sockets():
    return _in_parts(BF16())(TorchCollective())


@pytest.mark.thorough
def test_parts_over_sockets(pools):
    _check_parts(pools[3].run(_parts_over_sockets), 5e-2)


def _fed_back_or_not(collective, exchange, codec, sampling):
    """Mean and rest, with and without somebody who asks for the rest."""
    found = []
    for fed_back in (True, False):
        section, meter = Section(codec, LAYOUT, 0, fed_back), Meter(CPU)
        meter.sampling = sampling and not fed_back
        plan = exchange.plan([section], World(collective, CPU, meter), kept(exchange))
        rest = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(collective.rank))
        out = torch.full_like(rest, 7.0)
        plan.mean(rest, out, 5, torch.tensor(0.0))
        found += [out, rest]
    return found


@pytest.mark.parametrize("codec", [Rotated(), Rotated(bits=3), OneBit()], ids=repr)
@pytest.mark.parametrize("exchange", [AllGather(), TwoShot(), TwoShot(adagrad=1e-8)], ids=repr)
def test_the_mean_is_the_same_where_nobody_asks_for_the_rest(exchange, codec):
    for mean_with, _, mean_without, _ in run_threads(3, lambda each: _fed_back_or_not(each, exchange, codec, False)):
        assert mean_without.equal(mean_with)
    for _, wanted, _, rest in run_threads(3, lambda each: _fed_back_or_not(each, exchange, codec, True)):
        assert rest.equal(wanted)  # whose norm the meter takes
