"""Corrections inside DistributedDataParallel and Lightning, in real processes, against slow simulations."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.corrections import DGC, OneBitAdam
from tests.helpers.training import Net, digits, fit, parameters
from tests.reference.dgc import simulate_dgc

STEPS, BATCH, RATE = 20, 16, 0.05


def net():
    """Always the same at first."""
    torch.manual_seed(0)
    return Net()


def batches(size):
    """Different images on every rank."""
    images, labels = digits().tensors
    return [
        [
            (
                images[rank::size][step * BATCH : (step + 1) * BATCH],
                labels[rank::size][step * BATCH : (step + 1) * BATCH],
            )
            for rank in range(size)
        ]
        for step in range(STEPS)
    ]


def _train(compressor, arguments, optimizer):
    """Train a bare model on this rank; parameters by name, and the last step's ratio."""
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    compression = attach(model, compressor, **arguments)
    chosen = optimizer(model.parameters())
    for batch in batches(dist.get_world_size()):
        images, labels = batch[dist.get_rank()]
        chosen.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        chosen.step()
    assert len(compression.groups) > 1
    return {name: parameter.detach().numpy() for name, parameter in model.module.named_parameters()}


def _train_plainly(chosen):
    """The same without compression."""
    model = DistributedDataParallel(net())
    optimizer = chosen(model.parameters())
    for batch in batches(dist.get_world_size()):
        images, labels = batch[dist.get_rank()]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.module.named_parameters()}


def sgd(parameters):
    return torch.optim.SGD(parameters, RATE, momentum=0.9)


def check_follows(ranks, simulated):
    """All ranks the same, and near the simulation."""
    start = dict(net().named_parameters())
    for name, value in simulated.items():
        assert all(np.array_equal(ranks[0][name], other[name]) for other in ranks)
        moved = np.abs(value.numpy() - start[name].detach().numpy()).max()
        assert np.abs(ranks[0][name] - value.numpy()).max() <= 1e-4
        assert moved > 1e-3 or name == "body.0.bias"  # which batch norm takes off again


@pytest.mark.parametrize("dense_steps", [0, 5])
@pytest.mark.parametrize("size", [2, 3])
def test_dgc_follows_the_simulation(pools, size, dense_steps):
    method = DGC(density=0.02)
    ranks = pools[size].run(_train, method, {"warmup_steps": dense_steps}, sgd)
    check_follows(ranks, simulate_dgc(net(), batches(size), 0.02, RATE, 0.9, dense_steps))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dense_dgc_is_momentum_sgd(pools, size):
    dense = pools[size].run(_train, DGC(), {"warmup_steps": STEPS}, sgd)
    plain = pools[size].run(_train_plainly, sgd)
    check_follows(dense, {name: torch.from_numpy(value) for name, value in plain[0].items()})


def _large():
    """Bytes of a step of one large layer."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1000, 1000))
    compression = attach(model, "dgc", schedule="none")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=False)
    for step in range(3):
        optimizer.zero_grad()
        model(
            torch.randn(8, 1000, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        ).square().sum().backward()
        optimizer.step()
    return compression.stats()["ratio"], optimizer.param_groups[0]["momentum"]


def test_a_large_layer_travels_in_the_papers_few_bytes(pools):
    for ratio, momentum in pools[2].run(_large):
        assert 270 <= ratio <= 600
        assert momentum == 0


class Cycled(Net):
    """A scheduler that changes the momentum."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=10, base_momentum=0.85, max_momentum=0.9
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _refused(make, compressor="dgc"):
    try:
        fit(CompressedDDPStrategy(compressor), 4, make)
    except ValueError as error:
        return str(error)
    return "trained"


def _adamw():
    return Net("adamw")


@pytest.mark.parametrize("size", [1, 2])
def test_what_dgc_cannot_go_with_is_refused(pools, size):
    adam = pools[size].run(_refused, _adamw)
    assert all("dgc cannot be combined with AdamW" in answer for answer in adam)
    assert all("use torch.optim.SGD(lr=..., momentum=0.9)" in answer for answer in adam)
    for answer in pools[size].run(_refused, Cycled):
        assert re.search(r"SGD\(momentum=0\.8.*cycle_momentum=False", answer)


class Look(Callback):
    """The momentum of the optimizer in each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *args):
        self.seen.append(trainer.optimizers[0].param_groups[0]["momentum"])


def _strategy():
    look = Look()
    strategy = CompressedDDPStrategy({"name": "dgc", "density": 0.05})
    _, model = fit(strategy, 6, callbacks=[look])
    return look.seen, parameters(model).numpy(), strategy.comm_stats()["ratio"]


def test_dgc_in_lightning(pools):
    ranks = pools[2].run(_strategy)
    assert all(np.array_equal(ranks[0][1], other) for _, other, _ in ranks)
    assert all(seen == [0] * 6 for seen, _, _ in ranks)
    assert ranks[0][2] > 5


def adamw(parameters):
    return torch.optim.AdamW(parameters, 2e-3, weight_decay=0.1, eps=1e-4)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, 2e-3, weight_decay=0.1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_onebit_adam_begins_as_adamw(pools, size):
    ours = pools[size].run(_train, OneBitAdam(eps=1e-4), {"warmup_steps": STEPS}, plain_sgd)
    theirs = pools[size].run(_train_plainly, adamw)
    check_follows(ours, {name: torch.from_numpy(value) for name, value in theirs[0].items()})


def _losses(compressor, optimizer, dense=None):
    """Loss on all images before and after some epochs, on this rank, and the last step's ratio."""
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    compression = attach(model, compressor, warmup_steps=dense)
    chosen = optimizer(model.parameters())
    images, labels = digits().tensors
    losses = []
    for _ in range(4):
        for batch in batches(dist.get_world_size()):
            chosen.zero_grad()
            nn.functional.cross_entropy(model(batch[dist.get_rank()][0]), batch[dist.get_rank()][1]).backward()
            chosen.step()
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model.module(images), labels)))
    return losses, compression.stats()["ratio"], parameters(model).numpy()


def test_onebit_adam_trains_on_after_the_variance_froze(pools):
    ranks = pools[2].run(_losses, OneBitAdam(), plain_sgd, 20)
    losses, ratio, first = ranks[0]
    assert np.array_equal(first, ranks[1][2])
    assert ratio > 5
    assert losses[3] < 0.6 * losses[0]


@pytest.mark.parametrize("size", [1, 2])
def test_onebit_adam_refuses_adam(pools, size):
    for answer in pools[size].run(_refused_adam):
        assert "onebit_adam is Adam itself; use torch.optim.SGD(lr=..., weight_decay=...)" in answer


def _refused_adam():
    return _refused(_adamw, "onebit_adam")
