"""Sufficient factors against DistributedDataParallel's own gradients, on Gloo ranks."""


import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.backward import sufficient_factors as sf
from tests.helpers.sizes import by_turns

LINK = {"latency_s": 1e-6, "bytes_per_s": 1e7}


class Net(nn.Module):
    """A layer that is used twice, one that may be unused, sequences, and a head that never pays."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(96, 128)
        self.twice = nn.Linear(128, 128)
        self.maybe = nn.Linear(128, 128, bias=False)
        self.head = nn.Linear(128, 2)

    def forward(self, x, maybe=True):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(self.maybe(x) if maybe else x)


def wrapped(factors=True, compressor=None, make=Net, ddp=None, **settings):
    torch.manual_seed(dist.get_rank())  # rank 0's weights are everyone's
    module = make()
    settings = {"layers": ["first", "twice", "maybe", "head"], "link": LINK} | settings
    handle = sf.enable(module, sf.FactorSettings(**settings)) if factors else None
    model = DistributedDataParallel(module, **(ddp or {}))
    compression = attach(model, compressor) if compressor else None
    if handle:
        handle.begin(model, compression)
    return model, handle, compression


def data(step, rows, *shape):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, *shape, 96, generator=generator)


def gradients(model):
    return {name: None if each.grad is None else each.grad.clone() for name, each in model.module.named_parameters()}


def ragged():
    return 2 + dist.get_rank()  # rows of a rank


def plain(model, step, optimizer):
    optimizer.zero_grad()
    model(data(step, ragged())).square().mean().backward()


def accumulated(model, step, optimizer):
    optimizer.zero_grad()
    with model.no_sync():
        reused = data(step, ragged())
        model(reused).square().mean().backward()
        model(reused.copy_(data(step + 50, ragged()))).square().mean().backward()  # the same memory
    model(data(step + 70, 2)).square().mean().backward()


def twice_synchronised(model, step, optimizer):
    optimizer.zero_grad(set_to_none=False)
    model(data(step, 2)).square().mean().backward()
    model(data(step + 50, 3)).square().mean().backward()


def sequences(model, step, optimizer):
    optimizer.zero_grad()
    model(data(step, 1, 2)).square().mean().backward()


def clipped(model, step, optimizer):
    plain(model, step, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def unused_somewhere(model, step, optimizer):
    optimizer.zero_grad()
    model(data(step, 2), maybe=step == 0 or (step == 2 and dist.get_rank() == 1)).square().mean().backward()


def two_forwards(model, step, optimizer):
    """The first backward decides; the second one's graph was made before."""
    optimizer.zero_grad()
    losses = [model(data(step + 50 * each, 2)).square().mean() for each in range(2)]
    with model.no_sync():
        pass
    sum(losses).backward()


WAYS = {each.__name__: each for each in (plain, accumulated, twice_synchronised, sequences, clipped, unused_somewhere)}
WAYS["two_forwards"] = two_forwards


def _compare(way, compressor=None):
    """Largest error of ours against stock DDP's, of each parameter; whether ranks have the same bits; the ways."""
    ddp = {"find_unused_parameters": way == "unused_somewhere"}
    reference, _, _ = wrapped(False, ddp=ddp)
    model, handle, _ = wrapped(compressor=compressor, ddp=ddp)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (reference, model)]
    worst, same = {}, True
    for step in range(4):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            WAYS[way](each, step, optimizer)
        wanted, got = gradients(reference), gradients(model)
        for name in wanted:
            if wanted[name] is None:
                assert got[name] is None, name
                continue
            error = (wanted[name] - got[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-12)
            worst[name] = max(worst.get(name, 0.0), float(error))
            everyone = [torch.empty_like(got[name]) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, got[name])
            same = same and all(each.equal(everyone[0]) for each in everyone)
        for optimizer in optimizers:
            optimizer.step()
    ways = {layer.name: layer.way for layer in handle.layers}
    handle.close()
    return worst, same, ways


@pytest.mark.parametrize(("way", "size"), by_turns(list(WAYS), (2, 3, 4), take=1))
def test_gradients_are_those_of_ddp(pools, way, size):
    for worst, same, ways in pools[size].run(_compare, way):
        assert max(worst.values()) < 2e-5, worst
        assert same
        assert ways["first"] == ways["twice"] == ways["maybe"] == "factors"
        assert ways["head"] == "ordinary"
