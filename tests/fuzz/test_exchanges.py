"""Whatever one rank sends, all ranks end alike: with the same mean, or with an error each."""

import math

import pytest
import torch

from lightning_compress.codecs import QSGD, Dense, TopK
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import TwoShot
from lightning_compress.exchanges.message import Section
from tests.fuzz.decoding import randomness
from tests.fuzz.exchanging import CPU, LARGE, WAYS, Liar, exchange

SEED = 20
ROUNDS = 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("way", "size"), WAYS)
def test_a_rank_that_sends_garbage(way, size):
    for round in range(ROUNDS):
        exchange(way, size, randomness(SEED, way, size, round))


class Misleading(Liar):
    """Sends one rank an index that no vector has, or a sum that is not finite."""

    def __init__(self, inner, word):
        super().__init__(inner, None)
        self.word = word

    def all_to_all(self, send, receive):
        if self.rank == 0:
            send = send.clone()
            section = 16 + 160  # behind the flag, and the dense stretch
            send[1, section : section + 4] = torch.tensor([self.word], dtype=torch.int32).view(torch.uint8)
        super().all_to_all(send, receive)


def one_shard_is_spoilt(method, word):
    section = Section(method, LARGE, 0)

    def program(ranks):
        dense = Section(Dense(), Layout.of([("bias", (120,))]), LARGE.numel)
        plan = TwoShot().plan([dense, section], World(Misleading(ranks, word), CPU, Meter(CPU)))
        vector = torch.randn(LARGE.numel + 120, generator=torch.Generator().manual_seed(ranks.rank))
        out, flag = torch.zeros_like(vector), torch.zeros(())
        try:
            plan.mean(vector, out, 1, flag)
        except ValueError as error:
            return str(error)
        return [float(flag), out.tolist()]

    return run_threads(3, program, timeout=30.0)


@pytest.mark.timeout(60)
def test_all_ranks_stop_where_one_cannot_read_its_messages():
    said = one_shard_is_spoilt(TopK(0.05), 2**31 - 1)
    assert "indices outside" in said[1]
    assert all("rank 1" in said[rank] for rank in (0, 2))


@pytest.mark.timeout(60)
def test_a_sum_that_is_not_finite_reaches_all_ranks_as_nan():
    flags = [flag for flag, _ in one_shard_is_spoilt(QSGD(4, 64), 0x7FC00000)]
    assert all(math.isnan(flag) for flag in flags)
