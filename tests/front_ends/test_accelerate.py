"""``attach`` with what Accelerate's ``prepare`` returns; its loop is tried in test_examples.py."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach


class Prepared(torch.optim.Optimizer):
    """Passes everything on to another optimizer, as ``accelerate.optimizer.AcceleratedOptimizer`` does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


def _trained(prepared):
    """Weights after steps of a method that counts the steps of its one optimizer."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if prepared:
        optimizer = Prepared(optimizer)
    compression = attach(model, "onebit_adam", warmup_steps=2, optimizer=optimizer)
    for step in range(4):
        optimizer.zero_grad()
        seed = 10 * step + torch.distributed.get_rank()
        model(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
    assert compression.step == 4
    compression.close()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).tolist()


def test_a_prepared_optimizer_is_the_one_inside(pools):
    assert pools[2].run(_trained, True) == pools[2].run(_trained, False)
