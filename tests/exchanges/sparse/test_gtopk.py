"""The largest elements of the sum on a tree, and where the others stay."""

import numpy as np
import pytest
import torch

from lightning_compress.codecs import Dense, TopK
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.core.layout import Layout
from lightning_compress.core.meter import Meter
from lightning_compress.exchanges import GTopK
from lightning_compress.exchanges.message import Section
from tests.reference import sparse_sums

CPU = torch.device("cpu")
LAYOUT = Layout.of([("conv", (16, 9, 3, 3)), ("linear", (61, 37)), ("odd", (3, 131))])


def run(size, sections, vectors):
    """Before, after, mean and bytes of every rank."""

    def program(ranks):
        meter = Meter(CPU)
        plan = GTopK().plan(sections, World(CountingCollective(ranks, meter), CPU, meter))
        vector = vectors[ranks.rank].clone()
        out = torch.full_like(vector, 7.0)
        plan.mean(vector, out, 3, torch.tensor(0.0))
        return vectors[ranks.rank], vector, out, meter.bytes_sent

    return run_threads(size, program)


def parts_of(vectors, codec):
    """What each rank sends, as a dictionary."""
    parts = []
    for vector in vectors:
        sent = vector.clone()
        plan = codec.plan(LAYOUT, CPU)
        message = torch.zeros(plan.message_size, dtype=torch.uint8)
        plan.encode(sent, message, 0)
        numbers = (vector - sent).numpy()
        parts.append({int(place): numbers[place] for place in np.flatnonzero(numbers)})
    return parts


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("density", [0.01, 0.3])
@pytest.mark.parametrize("step", [0, 1])
def test_it_is_the_slow_one(size, density, step):
    vectors = [torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(size)]
    codec = TopK(density, "group")
    parts = parts_of(vectors, codec)
    kept, dropped = sparse_sums.gtopk(parts)
    mean = np.zeros(LAYOUT.numel, np.float32)
    mean[list(kept)] = list(kept.values())
    mean *= np.float32(1 / size)
    for rank, (before, after, out, _) in enumerate(run(size, [Section(codec, LAYOUT, 0)], vectors)):
        assert np.array_equal(out.numpy(), mean)
        left = before.numpy().copy()
        left[list(parts[rank])] = 0
        for place, value in dropped[rank].items():
            left[place] += value
        assert np.abs(after.numpy() - left).max() <= 1e-6
        assert np.array_equal(after.numpy() != 0, left != 0)
    assert np.count_nonzero(mean) == len(parts[0])  # just k
    assert any(dropped)


def test_no_mass_is_lost_where_one_subtree_keeps_what_another_drops():
    """P = 4, n = 12, k = 3: under the authors' bookkeeping more than half of all rounds lose some."""
    layout, lost = Layout.of([("weight", (12,))]), 0
    for seed in range(40):
        vectors = [torch.randn(12, generator=torch.Generator().manual_seed(100 * seed + rank)) for rank in range(4)]
        ranks = run(4, [Section(TopK(0.25), layout, 0)], vectors)
        applied = 4 * ranks[0][2].double()
        total = sum(before.double() for before, *_ in ranks)
        assert (applied + sum(after.double() for _, after, *_ in ranks) - total).abs().max() <= 1e-6
        final = ranks[0][2] != 0
        theirs = torch.zeros(12, dtype=torch.double)
        for before, *_ in ranks:
            sent = before.abs() >= before.abs().sort().values[-3]
            theirs += before * ~(final & sent)  # cleared only what is in the end
        lost += bool((applied + theirs - total).abs().max() > 1e-6)
    assert lost > 10


def test_every_section_keeps_its_own_share_and_dense_ones_stay_whole():
    sections = [
        Section(Dense(), LAYOUT.cut(0, 100), 0),
        Section(TopK(0.01, "group"), LAYOUT.cut(100, 2000), 100),
        Section(TopK(0.1, "group"), LAYOUT.cut(2000, LAYOUT.numel), 2000),
    ]
    scale = torch.ones(LAYOUT.numel)
    scale[2000:] = 1e-3
    vectors = [torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(r)) * scale for r in range(4)]
    ranks = run(4, sections, vectors)
    out = ranks[0][2]
    assert (out[:100] - sum(vectors)[:100] / 4).abs().max() <= 1e-6
    assert [int(each.count_nonzero()) for each in (out[100:2000], out[2000:])] == [19, 195]


def test_most_ranks_send_two_messages_whatever_their_number():
    layout = Layout.of([("weight", (1 << 16,))])
    counted = {}
    for size in (2, 4, 8, 16):
        vectors = [torch.randn(layout.numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
        counted[size] = sorted(each[3] for each in run(size, [Section(TopK(0.01), layout, 0)], vectors))
    message = 8 * 656 + 32
    for size, sent in counted.items():
        tables = (size.bit_length() + 1) * (size - 1) * 16
        assert sent[0] == message + tables  # a leaf: up alone
        assert sent[-1] == (size.bit_length() - 1) * message + tables  # the root: down, to each below
        assert sum(sent) == 2 * (size - 1) * message + size * tables
