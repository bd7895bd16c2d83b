"""Runs of zeros that are counted, and sums of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.codecs import Dense
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.exchanges import run_length
from lightning_compress.contrib.exchanges.recursive_doubling import SparseSum
from lightning_compress.contrib.exchanges.run_length import RunLength
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges.message import Section

CPU = torch.device("cpu")
VECTORS = st.lists(st.sampled_from([0.0, 0.0, 0.0, -0.0, 1.0, -1.0, 2.5]), min_size=1, max_size=120)


def coded(values):
    message = torch.full((run_length.most_bytes(len(values)),), 255, dtype=torch.uint8)
    return message[: run_length.write(values, message)]


def slow(values):
    """The same by hand: zeros before and numbers of each run, then the numbers."""
    tokens, numbers, zeros, before, run = [], [], 0, 0, []
    for value in [*values, None]:
        if value is not None and value != 0:
            if run and zeros > 2:
                tokens.append((before, len(run)))
                numbers, run = numbers + run, []
            if not run:
                before, zeros = zeros, 0
            run, zeros = [*run, *[0.0] * zeros, value], 0
        elif value is not None:
            zeros += 1
    if run:
        tokens.append((before, len(run)))
        numbers += run
    return tokens, numbers


@given(VECTORS)
@settings(max_examples=300, deadline=None)
def test_codes_are_the_slow_ones_and_come_back(values):
    message = coded(torch.tensor(values))
    tokens, numbers = slow(values)
    count, length = message[:8].view(torch.int32).tolist()
    assert (count, length) == (len(tokens), len(numbers))
    middle = 16 + 8 * count
    assert message[16:middle].view(torch.int32).tolist() == [each for token in tokens for each in token]
    assert message[middle:].view(torch.float32).tolist() == numbers
    assert len(message) <= 16 + 4 * len(values) + 8  # no more than the numbers and one run
    total = SparseSum(torch.zeros(len(values)), run_length.Runs())
    total.load(message)
    total.spread()
    assert total._room.tolist() == [value + 0.0 for value in values]
    assert not torch.signbit(total._room[total._room == 0]).any()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_the_sum_of_codes_is_the_code_of_the_sum(data):
    one = torch.tensor(data.draw(VECTORS))
    other = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, -1.0, 1.0, -2.5]), min_size=len(one), max_size=len(one)))
    )
    total = SparseSum(one.clone(), run_length.Runs())
    total.add(coded(other))
    message = torch.zeros(run_length.most_bytes(len(one)), dtype=torch.uint8)
    assert message[: total.write(message)].equal(coded(one + other))  # where numbers cancel, too


@pytest.mark.parametrize(
    "words",
    [[-1, 0], [1, 0], [2, 1], [1, 101], [1, 3, -1, 3], [1, 3, 98, 3], [2, 4, 0, 3, 0, 2], [2, 3, 0, 3, 0, 0]],
)
def test_damaged_runs_are_refused(words):
    message = torch.zeros(64, dtype=torch.uint8)
    message[:8].view(torch.int32).copy_(torch.tensor(words[:2]))
    message[16 : 16 + 4 * len(words[2:])].view(torch.int32).copy_(torch.tensor(words[2:], dtype=torch.int32))
    with pytest.raises(ValueError, match="damaged"):
        run_length.read_entries(message, 100)


def test_rows_of_zeros_take_nothing():
    """An embedding of which each rank touches 2 % of the rows, without any method."""
    layout = Layout.of([("embedding", (1000, 64))])

    def program(ranks):
        meter = Meter(CPU)
        plan = RunLength().plan([Section(Dense(), layout, 0)], World(CountingCollective(ranks, meter), CPU, meter))
        generator = torch.Generator().manual_seed(ranks.rank)
        vector = torch.zeros(1000, 64)
        vector[torch.randperm(1000, generator=generator)[:20]] = torch.randn(20, 64, generator=generator)
        before, out = vector.flatten(), torch.full((64000,), 7.0)
        plan.mean(before.clone(), out, 1, torch.tensor(0.0))
        return before, out, meter.bytes_sent

    ranks = run_threads(4, program)
    assert (ranks[0][1] - sum(before for before, *_ in ranks) / 4).abs().max() <= 1e-6
    assert all(out.equal(ranks[0][1]) for _, out, _ in ranks)
    rows = 20 + 40  # sent in two rounds
    assert all(sent <= rows * (4 * 64 + 8) + 300 for *_, sent in ranks)
