"""Work beside backward: in order, and errors reach who waits."""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.engine.hook import Background


def test_order_and_thread():
    background, done = Background(), []
    for number in range(100):
        background.submit(lambda number=number: done.append((number, threading.current_thread().name)), lambda: None)
    background.wait()
    assert [number for number, _ in done] == list(range(100))
    assert {name for _, name in done} == {"lightning_compress"}


def test_an_error_stops_the_rest_and_is_raised_once():
    background, done, told = Background(), [], []

    def fail():
        raise KeyError("here")

    background.submit(fail, lambda: told.append(1))
    background.submit(lambda: done.append(1), lambda: told.append(2))
    with pytest.raises(KeyError, match="here"):
        background.wait()
    assert told == [1, 2]
    assert not done
    background.submit(lambda: done.append(2), lambda: None)
    background.wait()
    assert done == [2]


def test_the_thread_ends_with_it_and_keeps_nothing():
    background = Background()
    tensor = torch.ones(3)
    held = weakref.ref(tensor)
    background.submit(lambda tensor=tensor: tensor.add_(1), lambda: None)
    background.wait()
    del tensor
    gc.collect()
    assert held() is None
    thread = next(each for each in threading.enumerate() if each.name == "lightning_compress")
    del background
    thread.join(10)
    assert not thread.is_alive()


def _beside_others():
    """Collectives of the user between the buckets, on the same process group as the model's."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.02, find_unused_parameters=True
    )
    compression = attach(model, {"name": "topk", "density": 1.0})
    seen = []

    def count(_):
        total = torch.ones(1)
        dist.all_reduce(total)
        seen.append(float(total))

    for layer in model.module:
        layer.weight.register_hook(count)
    threads = set()
    reduce = compression.reduce

    def noted(*given):
        threads.add(threading.current_thread().name)
        reduce(*given)

    compression.reduce = noted
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        model.zero_grad()
        model(inputs).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.manual_seed(0)
    plain = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]))
    plain(inputs).square().sum().backward()
    for one, other in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-5, atol=1e-6)
    return seen, threads


def test_others_collectives_do_not_come_between(pools):
    for seen, threads in pools[3].run(_beside_others):
        assert seen == [3.0] * 18
        assert threads == {"lightning_compress"}


def _two_models(restored):
    """Models that average at the same time: their means, and each one's alone."""
    means = {}
    for together in (False, True):
        models, handles = [], []
        for number in range(2):
            torch.manual_seed(number)
            models.append(DistributedDataParallel(nn.Linear(600, 1000, bias=False)))
            handles.append(attach(models[-1], {"name": "fft", "theta": 0.9}, exchange="all_gather"))
        inputs = [torch.randn(4, 600, generator=torch.Generator().manual_seed(9 * dist.get_rank() + n)) for n in (0, 1)]
        for model, each in zip(models, inputs, strict=True):
            model(each).square().sum().backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
            model.zero_grad()
        if restored:  # this thread makes all plans of both
            for handle in handles:
                handle.load_state_dict(copy.deepcopy(handle.state_dict()))
        losses = [model(each).square().sum() for model, each in zip(models, inputs, strict=True)]
        if together:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        means[together] = [model.module.weight.grad.clone() for model in models]
        for handle in handles:
            handle.close()
    return [one.equal(other) for one, other in zip(means[False], means[True], strict=True)]


@pytest.mark.parametrize("restored", [False, True])
def test_two_models_do_not_share_memory(pools, restored):
    for same in pools[2].run(_two_models, restored):
        assert same == [True, True]
