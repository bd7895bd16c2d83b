"""Numbers that are special: zeros below 0, and sums that are not finite."""

import pytest
import torch

from lightning_compress.codecs import BF16, Dense, Rows, TopK
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.wangni import Wangni
from lightning_compress.contrib.exchanges.butterfly import Butterfly
from lightning_compress.contrib.exchanges.recursive_doubling import RecursiveDoubling
from lightning_compress.contrib.exchanges.run_length import RunLength
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import SplitGather
from lightning_compress.exchanges.message import Section

CPU = torch.device("cpu")
LAYOUT, BIAS = Layout.of([("weight", (64, 48))]), Layout.of([("bias", (50,))])


def means(size, exchange, codec, vector_of):
    sections = [Section(codec, LAYOUT, 0), Section(Dense(), BIAS, LAYOUT.numel)]

    def program(collective):
        plan = exchange.plan(sections, World(collective, CPU, Meter(CPU)))
        vector, flag = vector_of(collective.rank), torch.tensor(0.0)
        out = torch.empty(len(vector))
        plan.mean(vector, out, 5, flag)
        return out, flag

    return run_threads(size, program)


def masked(rank):
    """As pruning leaves a gradient: -0.0 where it is masked and was below 0; more of it on some ranks."""
    draw = torch.Generator().manual_seed(rank)
    mask = torch.rand(LAYOUT.numel + BIAS.numel, generator=torch.Generator().manual_seed(9)) > (
        0.9 if rank % 2 else 0.3
    )
    return torch.randn(len(mask), generator=draw) * mask


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("codec", [BF16(), Rows(), Wangni(0.1), TopK(0.1)], ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    "exchange", [RecursiveDoubling(), RunLength(), SplitGather()], ids=lambda each: type(each).__name__
)
def test_ranks_have_equal_bits_where_zeros_have_signs(exchange, codec, size):
    if isinstance(codec, BF16) and not isinstance(exchange, RunLength):
        pytest.skip("for sparse messages")
    first, *others = (out.view(torch.int32) for out, _ in means(size, exchange, codec, masked))
    assert all(each.equal(first) for each in others)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "exchange",
    [RecursiveDoubling(), RunLength(), SplitGather(), Butterfly()],
    ids=lambda each: type(each).__name__,
)
def test_sums_that_overflow_are_a_flag(exchange, size):
    found = means(size, exchange, TopK(0.1), lambda _: torch.full((LAYOUT.numel + BIAS.numel,), 3e38))
    assert all(flag.isnan() for _, flag in found)
    assert all(out.equal(found[0][0]) for out, _ in found)
