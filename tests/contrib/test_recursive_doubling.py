"""Sums of few numbers, merged as lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_compress.contrib.exchanges.recursive_doubling import SparseSum, merged
from lightning_compress.exchanges.sparse import coding


def sparse(numel, share, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (numel,), generator=generator).float()  # sums that are 0 again are common
    return values * (torch.rand(numel, generator=generator) < share)


def message(values):
    out = torch.zeros(16 + 4 * len(values), dtype=torch.uint8)
    return out[: coding.write(values, out)]


@given(st.integers(1, 200), st.lists(st.floats(0, 0.6), min_size=1, max_size=5), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_sums_are_dense_sums(numel, shares, seed):
    parts = [sparse(numel, share, seed + number) for number, share in enumerate(shares)]
    room = parts[0].clone()
    total = SparseSum(room)
    dense = False
    for part in parts[1:]:
        total.add(message(part))
        assert not (dense and total.indices is not None)  # once dense, always dense
        dense = total.indices is None
        out = torch.full((16 + 4 * numel,), 255, dtype=torch.uint8)
        other = SparseSum(torch.full((numel,), 7.0))
        other.load(out[: total.write(out)])
        other.spread()
        total.spread()
        assert other._room.equal(room)
    assert room.equal(sum(parts[1:], parts[0]))


def test_the_switch_to_dense():
    def added(count, more):
        room = torch.zeros(100)
        room[:count] = 1
        total = SparseSum(room)
        other = torch.zeros(100)
        other[:more] = 1  # the same places: the rule bounds the union, and does not count it
        total.add(message(other))
        return total.indices is None

    assert not added(20, 29)
    assert added(20, 30)
    assert SparseSum(torch.ones(100)).indices is None
    assert SparseSum(torch.zeros(0)).indices is None


def test_all_places_in_a_list_are_no_dense_sum():
    """Exactly as many items as there are places: the count says how they are written."""
    values = torch.arange(1.0, 9.0)
    places = torch.arange(8)
    out = torch.zeros(16 + 32, dtype=torch.uint8)
    used = coding.write_entries(places, values, 8, out)
    read = torch.zeros(8)
    coding.read(out[:used], read)
    assert read.equal(values)


def test_merging_lists():
    places, values = merged(
        torch.tensor([1, 4, 9]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 4, 10]), torch.tensor([5.0, -2.0, 7.0])
    )
    assert places.tolist() == [0, 1, 4, 9, 10]
    assert values.tolist() == [5.0, 1.0, 0.0, 3.0, 7.0]


@pytest.mark.parametrize("places", [[3, 3], [5, 2], [1, 100]])
def test_lists_out_of_order_are_refused(places):
    out = torch.zeros(16 + 8 * 2, dtype=torch.uint8)
    coding.write_entries(torch.tensor([1, 2]), torch.ones(2), 100, out)
    out[16:24].view(torch.int32).copy_(torch.tensor(places))
    with pytest.raises(ValueError, match="damaged"):
        SparseSum(torch.zeros(100)).add(out)
