"""meProp under DistributedDataParallel: ranks that choose alone, and together."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.backward import enable
from tests.backward.reference import whole


def model_of(together):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    enable(model, 4, group=together)
    return model


def steps(view, together):
    """Two steps of two minibatches each on every rank; what is wrong."""
    group = dist.new_group() if together else None
    model = model_of(group)
    other = model_of(group)  # not wrapped, its gradients averaged by hand
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=0.003)
    rows = []
    for step in range(3):
        with ddp.no_sync():
            ddp(whole((8, 16), seed=100 * step + dist.get_rank())).sum().backward()
        ddp(whole((8, 16), seed=100 * step + 50 + dist.get_rank())).sum().backward()
        for offset in (0, 50):
            other(whole((8, 16), seed=100 * step + offset + dist.get_rank())).sum().backward()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mean = theirs.grad.clone()
            dist.all_reduce(mean)
            assert torch.allclose(ours.grad, mean / dist.get_world_size(), rtol=1e-5, atol=1e-6)
        rows.append(int((model[2].weight.grad != 0).any(1).sum()))
        for each in (model, other):
            for parameter in each.parameters():
                parameter.grad = None
    return rows


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_mean_over_ranks(pools, view, together):
    first, second = pools[2].run(steps, view, together)
    assert first == second
    assert all(4 <= each <= (8 if together else 16) for each in first)


def choose_together():
    model = model_of(dist.new_group())
    model(whole((8, 16), seed=dist.get_rank())).sum().backward()
    return [(model[number].weight.grad != 0).any(1).nonzero().flatten().tolist() for number in (0, 2)]


def test_ranks_that_share_keep_the_same_rows(pools):
    first, second = pools[2].run(choose_together)
    assert first == second


def empty_batches():
    """Ranks remember different things, or nothing, when all outputs are to be kept again."""
    group, rank = dist.new_group(), dist.get_rank()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    (sparsity,) = enable(model, 4, group=group, memory=1.0).values()
    remembered = []
    for k, sizes in ((4, (8, 0)), (1.0, (8, 8)), (4, (8, 8)), (1.0, (0, 8)), (1.0, (8, 8)), (4, (8, 8))):
        sparsity.resize(k)
        model(whole((sizes[rank], 16), seed=rank)).sum().backward()
        remembered.append(sparsity.memory is not None)
    return remembered


def test_empty_batches_where_all_is_kept_leave_nobody_waiting(pools):
    first, second = pools[2].run(empty_batches)
    assert first == [True, False, True, True, False, True]  # what a rank had no rows to add to, it keeps
    assert second == [False, False, True, False, False, True]


def averaged_by_hand():
    """An all-reduce of a gradient in place, of which its version counter says nothing."""
    model, rank = model_of(None), dist.get_rank()
    for step in range(3):
        model.zero_grad()
        model(whole((8, 16), seed=10 * step + rank)).sum().backward()
        assert int((model[2].weight.grad != 0).any(1).sum()) <= 4
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def test_gradients_that_are_averaged_in_place(pools):
    pools[2].run(averaged_by_hand)
