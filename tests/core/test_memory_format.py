"""A residual is that of its parameter, in whatever order the parameter's memory is."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.core import state_check, state_dict

LAST, PLAIN = torch.channels_last, torch.contiguous_format
METHODS = {
    "topk": {"name": "topk", "density": 0.02},
    "onebit": {"name": "onebit"},
    "dgc": {"name": "dgc", "density": 0.02},
}


def model(memory_format):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 5), nn.Flatten(), nn.Linear(24 * 4, 10))
    return DistributedDataParallel(net.to(memory_format=memory_format))


def step(ddp, optimizer, number):
    """A step; the local gradients of before the average."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    with ddp.no_sync():
        ddp(images).square().mean().backward()
    local = [each.grad.clone(memory_format=PLAIN) for each in ddp.parameters()]
    optimizer.zero_grad()
    ddp(images).square().mean().backward()
    optimizer.step()
    return local


def logical(state, ddp, kind):
    """What is kept of each parameter as a tensor of its shape."""
    shapes = {name: each.shape for name, each in ddp.module.named_parameters()}
    found = {}
    for group in state["groups"]:
        one = group["states"][kind]
        for name, part in zip(one["names"], one["numbers"].split(one["numels"]), strict=True):
            order = state["orders"].get(name, list(range(len(shapes[name]))))
            back = [order.index(each) for each in range(len(order))]
            found[name] = part.view([shapes[name][each] for each in order]).permute(back).contiguous()
    return found


def _conserved(memory_format, method):
    ddp = model(memory_format)
    compression = attach(ddp, method, exchange="all_gather")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.0)
    local = step(ddp, optimizer, 0)
    kept = logical(compression.state_dict(), ddp, "residual")
    worst = 0.0
    for (name, each), own in zip(ddp.module.named_parameters(), local, strict=True):
        total = own.clone()
        dist.all_reduce(total)
        left = kept.get(name, torch.zeros_like(own)).clone()
        dist.all_reduce(left)
        difference = dist.get_world_size() * each.grad + left - total
        worst = max(worst, float(difference.abs().max() / total.abs().max()))
    compression.close()
    return worst, sorted(compression.state_dict()["orders"])


@pytest.mark.parametrize("method", ["topk", "onebit"])
@pytest.mark.parametrize("memory_format", [LAST, PLAIN], ids=["last", "plain"])
def test_nothing_is_lost_by_the_order_that_is_said(pools, memory_format, method):
    for worst, orders in pools[2].run(_conserved, memory_format, METHODS[method]):
        assert worst < 1e-5
        assert orders == (["0.weight", "2.weight"] if memory_format is LAST else [])


def _moved(before, after, method):
    first = model(before)
    compression = attach(first, method)
    optimizer = torch.optim.SGD(first.parameters(), 0.01)
    for number in range(3):
        step(first, optimizer, number)
    state = copy.deepcopy(compression.state_dict())
    compression.close()
    second = model(after)
    compression = attach(second, method)
    compression.load_state_dict(copy.deepcopy(state))
    again = compression.state_dict()
    kinds = sorted(state["groups"][0]["states"])
    same = [
        name
        for kind in kinds
        for (name, one), (_, other) in zip(
            sorted(logical(state, first, kind).items()), sorted(logical(again, second, kind).items()), strict=True
        )
        if one.equal(other)
    ]
    nonzero = all(bool(each.any()) for name, each in logical(again, second, "residual").items() if name == "2.weight")
    old = {name: each for name, each in state.items() if name != "orders"}  # of an earlier version
    compression.load_state_dict(old)
    numbers = [
        one["states"]["residual"]["numbers"] for one in (state["groups"][0], compression.state_dict()["groups"][0])
    ]
    compression.close()
    return len(same), sum(len(logical(state, first, kind)) for kind in kinds), nonzero, numbers[0].equal(numbers[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "after"), [(LAST, PLAIN), (PLAIN, LAST), (LAST, LAST)])
def test_a_run_goes_on_in_another_memory_format(pools, before, after, method):
    for same, everything, nonzero, older in pools[2].run(_moved, before, after, METHODS[method]):
        assert same == everything > 0
        assert nonzero
        assert older


@pytest.mark.parametrize("orders", [[], {"a": 3}, {"a": [0, 0]}, {"a": [1, 2]}, {"a": ["0"]}, {3: [0]}, {"a": [0.0]}])
def test_a_damaged_order_is_refused(orders):
    state = state_dict.build("TopK", 0, {}, {"compressor": None, "error_feedback": True, "scheduled": {}}, [], {}, 0)
    assert state_check.check(dict(state)) == state
    with pytest.raises(ValueError, match="in which order"):
        state_check.check(state | {"orders": orders})


def test_an_order_of_another_shape_is_refused():
    state = state_dict.build("TopK", 0, {}, {}, [], {"a": [0, 2, 1]}, 0)
    with pytest.raises(ValueError, match=r"a in the order \[0, 2, 1\]"):
        state_dict.reordered(state, {"a": (3, 4)}, {})


def test_settings_may_be_long_tables_and_no_endless_ones():
    running = {"compressor": {"levels": list(range(2000))}, "error_feedback": True, "scheduled": {}}
    state = state_dict.build("TopK", 0, {}, running, [], {}, 0)
    assert state_check.check(state) == state
    running["compressor"]["levels"] = [[[0] * 1000] * 1000] * 1000
    with pytest.raises(ValueError, match="in numbers and texts"):
        state_check.check(state | {"running": running})
