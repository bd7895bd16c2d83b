"""Right before good: ResNet-20 on CIFAR-10 follows a slow single-process simulation of the same algorithm."""

from itertools import accumulate

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import CompressedDDPStrategy
from recipes.resnet.cifar10 import TRAIN_FILES, read_batches
from recipes.resnet.model import ResNet
from tests.helpers.training import quiet_trainer
from tests.reference.codecs import efsign, onebit, topk
from tests.reference.simulation import simulate

BATCH, RATE, MOMENTUM = 8, 0.1, 0.9


def ranges(lengths):
    """Where each parameter stands."""
    ends = list(accumulate(lengths))
    return list(zip([0, *ends], ends, strict=False))


METHODS = {
    "topk": ({"name": "topk", "density": 0.01}, lambda vector, lengths, _: topk(vector, 0.01, ranges(lengths))),
    "onebit": ({"name": "onebit", "block": 1024}, lambda vector, lengths, _: onebit(vector, 1024)),
    "efsign": ({"name": "efsign", "block": 512}, lambda vector, lengths, _: efsign(vector, 512)),
}


class Learner(pl.LightningModule):
    """ResNet-20 from a fixed start; remembers the groups of every step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = ResNet(20)
        self.groups = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        groups = self.trainer.strategy.compression.groups
        self.groups.append([[name.removeprefix("net.") for name in group.names] for group in groups])

    def configure_optimizers(self):
        return _sgd(self.net)


def _sgd(net):
    return torch.optim.SGD(net.parameters(), RATE, momentum=MOMENTUM)


def _images(root, steps):
    """Real images, normalised, and their labels."""
    split = read_batches(root, TRAIN_FILES[:1])
    return (split.images[: steps * BATCH * 3].float() / 255 - 0.47) / 0.25, split.labels[: steps * BATCH * 3]


def _train(compressor, root, steps):
    learner = Learner()
    strategy = CompressedDDPStrategy(compressor, exchange="all_gather", error_feedback=True)
    trainer = quiet_trainer(strategy, max_steps=steps, use_distributed_sampler=False)
    share = TensorDataset(*(each[dist.get_rank() :: dist.get_world_size()] for each in _images(root, steps)))
    trainer.fit(learner, DataLoader(share, BATCH))
    return {name: parameter.detach().numpy() for name, parameter in learner.net.named_parameters()}, learner.groups


GRID = [
    ("onebit", 3, 20),
    *(pytest.param(name, size, 50, marks=pytest.mark.thorough) for name in METHODS for size in (2, 3)),
]


@pytest.mark.parametrize(("name", "size", "steps"), GRID)
def test_training_follows_the_simulation(pools, cifar10, name, size, steps):
    compressor, method = METHODS[name]
    real, groups = pools[size].run(_train, compressor, cifar10, steps)[0]
    assert len(groups) == steps
    assert len(groups[1]) > 1  # DDP has rebuilt its buckets
    images, labels = _images(cifar10, steps)
    batches = [
        [
            (
                images[rank::size][step * BATCH : (step + 1) * BATCH],
                labels[rank::size][step * BATCH : (step + 1) * BATCH],
            )
            for rank in range(size)
        ]
        for step in range(steps)
    ]
    simulated = simulate(Learner().net, batches, groups, method, _sgd)
    start = dict(Learner().net.named_parameters())
    for parameter, value in simulated.items():
        moved = np.abs(value.numpy() - start[parameter].detach().numpy()).max()
        difference = np.abs(real[parameter] - value.numpy()).max()
        assert difference <= 1e-4, f"{parameter}: {difference}, where training moved it by {moved}"
        assert moved > 1e-3
