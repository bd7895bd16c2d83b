"""What a bucket is made up of: groups of a cap, whatever the bucket, in the parameters' own dtype."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine.group import Group
from lightning_compress.exchanges.exchange import longest
from lightning_compress.settings.run_state import RunState

CPU, MEGA = torch.device("cpu"), 1 << 20


class Layers(nn.Sequential):
    """Six matrices of 1 MiB and their biases."""

    def __init__(self, dtype=torch.float32):
        width = 512
        super().__init__(*[nn.Linear(width, width, dtype=dtype) for _ in range(6)])


def _groups(steps):
    """Names of the groups after each step, whether they are the same objects, and the largest one's bytes."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Layers(), bucket_cap_mb=2)
    compression = attach(model, "topk")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 512, generator=torch.Generator().manual_seed(step + dist.get_rank()))).sum().backward()
        optimizer.step()
        seen.append([(id(group), group.layout.numel * 4, sorted(group.names)) for group in compression.groups])
    return seen


def test_the_first_step_has_the_groups_of_all_others(pools):
    """DDP's first bucket is the whole model; its groups are those that the rebuilt buckets will be."""
    for first, second, third in pools[2].run(_groups, 3):
        assert len(first) > 2
        assert all(size < 2 * MEGA + MEGA + 4096 for _, size, _ in first)
        assert first == second == third


def _bytes(dtype, compressor):
    """Bytes of a dense step and of one more, over those of stock DDP; and whether the dense mean is exact."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Layers(dtype))
    compression = attach(model, compressor, warmup_steps=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    ratios, exact = [], True
    for step in range(2):
        optimizer.zero_grad()
        data = torch.randn(4, 512, generator=torch.Generator().manual_seed(step + dist.get_rank())).to(dtype)
        model(data).square().sum().backward()
        if step == 0:
            mine = list(torch.autograd.grad(model.module(data).square().sum(), list(model.parameters())))
            for gradient, parameter in zip(mine, model.parameters(), strict=True):
                expected = gradient / 2
                dist.all_reduce(expected)
                exact = exact and expected.equal(parameter.grad)
        optimizer.step()
        stats = compression.stats()
        ratios.append(stats["bytes_sent"] / stats["bytes_dense"])
    return ratios, exact


@pytest.mark.parametrize("compressor", ["qsgd", "bf16", "topk", "onebit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_dense_is_sent_in_its_own_dtype(pools, dtype, compressor):
    """Law 5 over dtypes: no step sends more than stock DDP, but for the heads of messages."""
    for (dense, compressed), exact in pools[2].run(_bytes, dtype, compressor):
        assert dense <= 1.001
        assert compressed <= 1.001
        if compressor in ("qsgd", "bf16"):  # nothing is kept: what DDP does
            assert dense == 1.0
            assert exact


def test_lengths_may_be_more_than_an_int32_holds():
    """A parameter of 2 GB and more is a group, and a message, of its own."""
    most = 5 << 31

    def program(collective):
        return longest(most if collective.rank else 16, most, collective, torch.device("cpu"))

    assert run_threads(2, program) == [most, most]


def _dense_of_float64():
    torch.manual_seed(0)
    model = DistributedDataParallel(Layers(torch.float64))
    attach(model, "topk")
    data = torch.randn(4, 512, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    model(data).square().sum().backward()
    mine = torch.autograd.grad(model.module(data).square().sum(), model.module[3].bias)[0] / 2
    dist.all_reduce(mine)
    return mine.equal(model.module[3].bias.grad)


def test_what_stays_dense_of_float64_is_exact(pools):
    assert pools[2].run(_dense_of_float64) == [True, True]


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot", {"name": "two_shot", "sums": "same"}, "binomial"])
def test_what_stays_dense_of_float16_is_not_cut(exchange):
    given = RunState.of("rotated", exchange)

    def mean(collective):
        shapes = [("weight", (64, 64)), ("bias", (64,))]
        group = Group(shapes, given, World(collective, CPU, Meter(CPU)), dtype=torch.float16)
        gradients = [torch.full((numel,), value, dtype=torch.float16) for numel, value in ((64 * 64, 0.01), (64, 4e4))]
        group.reduce(gradients, 0, None)
        return float(gradients[1][0])

    assert run_threads(4, mean) == [40000.0] * 4
