"""``deterministic=True``: sums in the order of the ranks, whatever the buckets are."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_compress import CompressedDDPStrategy
from lightning_compress.codecs import Dense
from lightning_compress.collectives import OrderedCollective, TorchCollective, run_threads
from lightning_compress.exchanges import AllReduce
from lightning_compress.testing.thread_ranks import average
from tests.helpers.training import fit, parameters
from tests.strategies.test_resume import interrupted


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (7, 5), (1003,)])
def test_from_rank_0_on(size, dtype, shape):
    numbers = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]

    def reduce(collective):
        mine = numbers[collective.rank].clone()
        OrderedCollective(collective).all_reduce(mine)
        return mine

    expected = numbers[0].clone()
    for each in numbers[1:]:
        expected += each
    assert all(torch.equal(got, expected) for got in run_threads(size, reduce))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_mean_is_the_sum_over_the_ranks_or_the_number_next_to_it(size):
    """As law 4 of docs/architecture.md says: bit for bit where 1 / W is a number of float32."""
    made = run_threads(size, lambda ranks: average(OrderedCollective(ranks), Dense(), AllReduce()))
    total = made[0].before.clone()
    for each in made[1:]:
        total += each.before
    off = (made[0].mean.view(torch.int32) - (total / size).view(torch.int32)).abs().max()
    assert off == (0 if size in (2, 4, 8) else 1)
    assert all(each.mean.equal(made[0].mean) for each in made)


def test_integers_are_left_alone():
    def reduce(collective):
        mine = torch.tensor([1, 2, 3]) * (collective.rank + 1)
        OrderedCollective(collective).all_reduce(mine)
        return mine

    assert all(got.tolist() == [6, 12, 18] for got in run_threads(3, reduce))


def _over_sockets():
    mine = torch.full((1001,), 0.1 * (dist.get_rank() + 1))
    OrderedCollective(TorchCollective()).all_reduce(mine)
    return mine.numpy()


def test_over_sockets(pools):
    expected = np.float32(0.1) + np.float32(0.2) + np.float32(0.3)
    assert all((got == expected).all() for got in pools[3].run(_over_sockets))


def _buckets(bucket_cap_mb, deterministic):
    strategy = CompressedDDPStrategy("none", bucket_cap_mb=bucket_cap_mb, deterministic=deterministic)
    _, model = fit(strategy, 6)
    return parameters(model).numpy(), strategy.comm_stats()


def test_other_buckets_same_sums(pools):
    small, large = (pools[3].run(_buckets, cap, True) for cap in (0.02, 25))
    assert all(np.array_equal(got, small[0][0]) for got, _ in [*small, *large])
    other = pools[3].run(_buckets, 0.02, False)[0][0], pools[3].run(_buckets, 25, False)[0][0]
    assert not np.array_equal(*other)  # which is what it is for
    assert small[0][1]["ratio"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("size", [3, 4])
def test_none_resumes_bit_for_bit(pools, tmp_path, size):
    assert all(same for same, _ in pools[size].run(_none, str(tmp_path)))


def _none(folder):
    return interrupted(folder, "none", deterministic=True)
