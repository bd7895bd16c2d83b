"""Messages whose lengths vary, in exchanges that do not wait for lengths."""

import pytest
import torch

from lightning_compress.codecs import QSGD
from lightning_compress.collectives import Collective, World, run_threads
from lightning_compress.collectives.counting import CountingCollective, Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllGather, TwoShot
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.varying import Varying

pytest.importorskip("numba")
CPU = torch.device("cpu")
NUMEL = 3 << 20
"""Of three parts."""


def means(exchange, coding, collective):
    """Means of gradients that change their shape, and the bytes sent for each."""
    meter = Meter(CPU)
    counting = CountingCollective(collective, meter)
    sections = [Section(QSGD(coding=coding), Layout.of([("weight", (NUMEL,))]), 0)]
    plan, found, sent = exchange.plan(sections, World(counting, CPU, meter)), [], []
    for step, power in enumerate((1, 1, 3, 3, 1)):
        vector = torch.randn(NUMEL, generator=torch.Generator().manual_seed(collective.rank + 10 * step)) ** power
        out, before = torch.empty(NUMEL), meter.bytes_sent
        plan.mean(vector, out, step, torch.zeros(()))
        found.append(out)
        sent.append(meter.bytes_sent - before)
    return found, sent


@pytest.mark.parametrize(("exchange", "ranks"), [(TwoShot(), 3), (AllGather(), 2)], ids=str)
def test_means_are_those_of_packed_messages(exchange, ranks):
    coded = run_threads(ranks, lambda collective: means(exchange, "entropy", collective))
    packed = run_threads(ranks, lambda collective: means(exchange, "packed", collective))
    for (found, sent), (wanted, more) in zip(coded, packed, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert all(one < 0.9 * other for one, other in zip(sent, more, strict=True))
        assert sent[3] < 0.8 * sent[1]  # it has learned that they are shorter
        assert sent[2] <= 1.01 * sent[1]


def test_a_wrong_length_is_refused_by_all():
    def program(collective: Collective) -> str:
        varying = Varying(collective, CPU, [[0, 16], [16, 0]], [[0, 64], [64, 0]])
        peer, rows = 1 - collective.rank, torch.zeros(2, 64, dtype=torch.uint8)
        message = torch.full((64,), collective.rank, dtype=torch.uint8)
        varying.begin({peer: message}, {peer: 48}, rows)()
        assert (rows[peer, :48] == peer).all()
        try:
            varying.begin({peer: message}, {peer: 80 if peer else 32}, rows)()
        except ValueError as error:
            return str(error)
        return ""

    one, other = run_threads(2, program)
    assert one == other
    assert "80 bytes" in one
