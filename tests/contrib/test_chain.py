"""Trees of encoded sums, chains of dense ones, and both: the reduction of S-Caffe."""

import math

import pytest
import torch

from lightning_compress.codecs import BF16, QSGD, Dense, OneBit, TopK
from lightning_compress.collectives import CountingCollective, TorchCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.exchanges import chain
from lightning_compress.contrib.exchanges.binomial import Binomial
from lightning_compress.contrib.exchanges.butterfly import Butterfly
from lightning_compress.contrib.exchanges.chain import Chain
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import Hierarchical
from lightning_compress.exchanges.message import Section
from tests.exchanges.test_exchanges import LAYOUT, check, mean
from tests.fuzz.exchanging import Liar

CPU = torch.device("cpu")
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]
ONEBIT = OneBit()
VARIABLE = TopK(0.02, values="fp16", indices="rice")
CHAINS = [(2, 3), (2, 4), (3, 4), (2, 5), (3, 5), (4, 6), (3, 7), (3, 8), (4, 9), (4, 16), (5, 16)]
"""Ranks of a node, and of all nodes; the last node is often a smaller one."""


def counted(collective, exchange, codec, flag=0.0):
    """What ``mean`` gives, and bytes as they were counted."""
    meter = Meter(CPU)
    *rest, plan = mean(CountingCollective(collective, meter), exchange, codec, flag=flag)
    return *rest, plan, meter.bytes_sent


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", [TopK(0.05), VARIABLE, OneBit(), QSGD(), BF16()], ids=repr)
def test_a_tree_at_many_ranks(size, codec):
    ranks = run_threads(size, lambda collective: counted(collective, Binomial(), codec))
    check(ranks)
    assert all(sent == plan.cost.bytes_sent for *_, plan, sent in ranks) or codec is VARIABLE


@pytest.mark.parametrize("size", range(2, 10))
def test_it_is_the_slow_one(size):
    codec, key = OneBit(block=64), 5
    vectors = [torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    held, plan = [vector.clone() for vector in vectors], codec.plan(LAYOUT, CPU)

    def encoded(vector):
        message = torch.zeros(plan.message_size, dtype=torch.uint8)
        plan.encode(vector, message, key)
        return message[None]

    distance = 1
    while distance < size:
        for rank in range(distance, size, 2 * distance):
            plan.decode(encoded(held[rank]), held[rank - distance], 1.0, accumulate=True)
        distance *= 2
    expected = torch.empty(LAYOUT.numel)
    plan.decode(encoded(held[0]), expected, 1 / size, accumulate=False)

    def program(collective):
        made = Binomial().plan([Section(codec, LAYOUT, 0)], World(collective, CPU, Meter(CPU)))
        own, out = vectors[collective.rank].clone(), torch.empty(LAYOUT.numel)
        made.mean(own, out, key, torch.tensor(0.0))
        return own, out

    for (own, out), left in zip(run_threads(size, program), held, strict=True):
        assert out.equal(expected)
        assert own.equal(left)


def test_half_of_the_ranks_send_one_message():
    message = 16 + 16 + 48 + 4 * 100 + 16 + 2 * (LAYOUT.numel - 100)  # checksum, flag, dense elements, casts
    for size in (2, 4, 8, 16):
        ranks = run_threads(size, lambda collective: counted(collective, Binomial(), BF16()))
        table = 16 * (size - 1)
        sent = [(each[-1] - table) / (ranks[1][-1] - table) for each in ranks]
        below = [(rank & -rank).bit_length() - 1 for rank in range(1, size)]  # children of those that have a parent
        assert sent == [size.bit_length() - 1, *(1 + children for children in below)]
        assert ranks[1][-1] - table == pytest.approx(message, abs=64)


@pytest.mark.parametrize(("node", "size"), CHAINS)
@pytest.mark.parametrize("codec", [Dense(), VARIABLE, OneBit()], ids=repr)
def test_chains_and_a_tree_at_many_ranks(node, size, codec):
    ranks = run_threads(size, lambda collective: counted(collective, Chain("binomial", node), codec))
    check(ranks)
    assert all(sent == plan.cost.bytes_sent for *_, plan, sent in ranks) or codec is VARIABLE
    assert [bool(after.any()) for _, after, *_ in ranks] == [
        rank % node == 0 and not isinstance(codec, Dense) for rank in range(size)
    ]


@pytest.mark.parametrize("chunk", [1, 1000, 4999])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_chunks_follow_one_another(monkeypatch, chunk, size):
    monkeypatch.setattr(chain, "CHUNK", chunk)
    numel = 9973

    def program(collective):
        meter = Meter(CPU)
        made = chain.Links(CountingCollective(collective, meter), numel, CPU)
        own = torch.randn(numel, generator=torch.Generator().manual_seed(collective.rank))
        made.row.copy_(own)
        made.reduce()
        sums = made.row.clone()
        made.share()
        return own, sums, made.row, made, meter.bytes_sent

    ranks = run_threads(size, program)
    total = ranks[-1][0].clone()
    for own, *_ in reversed(ranks[:-1]):
        total = own + total
    assert ranks[0][1].equal(total)  # from the last rank on
    assert all(row.equal(total) for _, _, row, *_ in ranks)
    assert all(sent == made.cost.bytes_sent for *_, made, sent in ranks)
    count = min(64, numel // chunk) if size > 2 else 1
    for *_, made, _ in ranks:
        assert made.cost.rounds == count + size - 2 + 1 + (size - 1).bit_length()


@pytest.mark.parametrize("bad", [0, 1, 2, 4])
@pytest.mark.parametrize("exchange", [Binomial(), Chain("all_gather", 2)], ids=repr)
def test_a_flag_of_any_rank_reaches_all(exchange, bad):
    flags = run_threads(5, lambda c: mean(c, exchange, OneBit(), flag=math.nan if c.rank == bad else 0.0)[3])
    assert all(flag.isnan() for flag in flags)


class Damaging(Liar):
    """Changes the messages that rank 0 sends."""

    def swap(self, sends, receives):
        if self.rank == 0:
            sends = {peer: tensor.clone() for peer, tensor in sends.items()}
            for tensor in sends.values():
                if tensor.dtype == torch.uint8:
                    tensor[20] ^= 1
        self.inner.swap(sends, receives)

    def part(self, ranks):
        return Damaging(self.inner.part(ranks), None)


def said(size, exchange, world=lambda collective: collective, codec=ONEBIT):
    """What each rank's error says."""

    def program(collective):
        try:
            mean(world(collective), exchange, codec)
        except ValueError as error:
            return str(error)
        return "went on"

    return run_threads(size, program, timeout=30.0)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_damaged_message_is_an_error_on_every_rank(size):
    words = said(size, Binomial(), lambda collective: Damaging(collective, None))
    assert "the message of rank 0 was changed on the way" in " ".join(words)
    assert all("damaged" in each or "received a message that it cannot read" in each for each in words)


class Misstating(Liar):
    """Says on rank 1 that its message is shorter than it is."""

    def all_gather(self, tensor, out):
        self.inner.all_gather(tensor.clamp(max=32) if self.rank == 1 else tensor, out)


@pytest.mark.parametrize("size", [2, 5])
def test_a_wrong_length_is_an_error_on_every_rank(size):
    words = said(size, Binomial(), lambda collective: Misstating(collective, None), VARIABLE)
    assert "the message of rank 1 was changed on the way" in words[0]
    assert all("received a message that it cannot read" in each for each in words[1:])


def test_a_leaders_error_is_one_of_its_whole_node():
    words = said(5, Chain("binomial", 2), lambda collective: Damaging(collective, None))
    assert "was changed on the way" in words[2]
    assert ["the first rank of a node" in each for each in words] == [False, True, False, True, False]
    words = said(5, Chain(Butterfly((2, 2)), 2))  # of 4 leaders, and there are 3
    assert ["cannot use the exchange between nodes" in each for each in words] == [False, True, False, True, False]
    assert "went on" not in words


def test_sums_that_overflow_are_a_flag():
    section = Section(OneBit(), Layout.of([("weight", (1000,))]), 0)

    def program(collective, exchange):
        plan = exchange.plan([section], World(collective, CPU, Meter(CPU)))
        vector, out, flag = torch.full((1000,), 3e38), torch.empty(1000), torch.tensor(0.0)
        plan.mean(vector, out, 5, flag)
        assert vector.isfinite().all()  # which is kept
        return flag

    for exchange in (Binomial(), Hierarchical("all_gather", 2), Chain("all_gather", 2)):
        assert all(flag.isnan() for flag in run_threads(4, lambda each, way=exchange: program(each, way)))


def _over_sockets(exchange, codec):
    return counted(TorchCollective(), exchange, codec)[:4]


@pytest.mark.parametrize("codec", [VARIABLE, OneBit()], ids=repr)
@pytest.mark.parametrize(
    ("exchange", "size"),
    [
        (Binomial(), 3),
        pytest.param(Binomial(), 4, marks=pytest.mark.thorough),
        (Chain("binomial", 2), 4),
        (Chain("two_shot", 3), 4),
    ],
    ids=repr,
)
def test_the_same_over_sockets(pools, exchange, size, codec):
    sockets = pools[size].run(_over_sockets, exchange, codec)
    threads = run_threads(size, lambda collective: mean(collective, exchange, codec))
    check(sockets)
    assert all(socket[2].equal(thread[2]) for socket, thread in zip(sockets, threads, strict=True))
    assert all(socket[1].equal(thread[1]) for socket, thread in zip(sockets, threads, strict=True))
