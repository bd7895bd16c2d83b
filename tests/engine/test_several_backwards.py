"""Several backwards in a training step, also while parameters are frozen: nothing is lost or applied twice."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from tests.helpers.training import fit
from tests.turns import by_turns


class SeveralBackwards(pl.LightningModule):
    """Two backwards in each step, of which Lightning prepares DistributedDataParallel for one forward alone."""

    def __init__(self, kind):
        super().__init__()
        self.automatic_optimization = False
        self.kind = kind
        self.first, self.second = nn.Parameter(torch.zeros(61, 67)), nn.Parameter(torch.zeros(53, 47))
        self.brought = [torch.zeros_like(each) for each in self.parameters()]

    def configure_optimizers(self):
        return [torch.optim.SGD([each], 1.0) for each in self.parameters()]

    def backwards(self, number, counts):
        generator = torch.Generator().manual_seed(100 * number + self.global_rank)
        gradients = [torch.randn(each.shape, generator=generator) for each in self.parameters()]
        for place in counts:
            self.brought[place] += gradients[place]
        self.manual_backward(sum((each * own).sum() for each, own in zip(self.parameters(), gradients, strict=True)))

    def training_step(self, batch, batch_idx):
        optimizers, number = self.optimizers(), 2 * batch_idx
        if self.kind == "adversarial":  # each loss reaches both, and is for one
            for place, each in enumerate(optimizers):
                each.zero_grad()
                self.backwards(number + place, [place])
                each.step()
            return
        self.backwards(number, [0, 1] if self.kind == "added" else [])
        for each in optimizers if self.kind == "sharpness" else ():
            each.zero_grad()
        self.backwards(number + 1, [0, 1])
        for each in optimizers:
            each.step()
            each.zero_grad()


class Frozen(SeveralBackwards):
    """As a GAN trains: a loss is for one part, which alone is trained until the next loss comes."""

    def training_step(self, batch, batch_idx):
        for place, optimizer in enumerate(self.optimizers()):
            for number, each in enumerate(self.parameters()):
                each.requires_grad_(number == place)
            self.backwards(2 * batch_idx + place, [place])
            if self.kind == "frozen" or batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()


def _several(make, kind, compressor):
    strategy = CompressedDDPStrategy(compressor, min_numel=1, find_unused_parameters=make is Frozen)
    kept = {}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            for group in strategy.compression.groups:
                for segment in group.residual.layout.segments:
                    kept[segment.name] = group.residual.committed[segment.offset : segment.end].clone()

    _, model = fit(strategy, 100, lambda: make(kind), [Look()], limit_train_batches=8, max_epochs=1)
    return list(zip((each.detach() for each in model.parameters()), model.brought, kept.values(), strict=True))


KINDS = {
    "adversarial": SeveralBackwards,
    "sharpness": SeveralBackwards,
    "added": SeveralBackwards,
    "frozen": Frozen,
    "frozen, every second batch": Frozen,
}


@pytest.mark.parametrize(("kind", "size"), by_turns(KINDS, (2, 3), 1))
def test_several_backwards_in_a_training_step(pools, kind, size):
    for compressor in ({"name": "topk", "density": 0.05}, {"name": "dgc", "density": 0.05, "momentum": 0.0}):
        ranks = pools[size].run(_several, KINDS[kind], kind, compressor)
        for part in zip(*ranks, strict=True):
            applied = -size * part[0][0]
            brought, kept = sum(mine for _, mine, _ in part), sum(rest for *_, rest in part).view_as(applied)
            assert float((applied + kept - brought).norm() / brought.norm()) < 1e-5


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(61, 67)), nn.Parameter(torch.zeros(53, 47))

    def forward(self):
        return self.first.sum() + self.second.sum()


def _freezes():
    ddp = DistributedDataParallel(Pair(), find_unused_parameters=True)
    compression = attach(ddp, "bf16", min_numel=1)
    optimizer = torch.optim.SGD([ddp.module.first], 1.0)
    for number in range(4):
        ddp.module.second.requires_grad_(number < 1)
        optimizer.zero_grad()
        ddp().backward()
        optimizer.step()
    compression.close()
    return float(ddp.module.first.detach().mean())


def test_a_parameter_that_no_optimizer_owns_may_be_frozen_later(pools):
    assert pools[2].run(_freezes) == [pytest.approx(-4.0)] * 2
