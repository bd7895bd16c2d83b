"""A loop of Fabric that does what ``tests.helpers.training.fit`` does with a Trainer."""

import itertools
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.helpers.training import Net, digits


def launched(strategy, **options):
    """A Fabric over the ranks of a pool."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options)
    fabric.launch()
    return fabric


def set_up(fabric, optimizer="sgd", seed=1, apart=False):
    """The model and optimizer of ``fit``, from the same start."""
    torch.manual_seed(seed)
    model = Net(optimizer)
    steps = model.configure_optimizers()
    if apart:
        model = fabric.setup_module(model)
        return model, fabric.setup_optimizers(steps)
    return fabric.setup(model, steps)


def train(fabric, model, optimizer, steps, begin=0, accumulate=1, clip=None):
    """Optimizer steps ``begin`` to ``steps``, each on the batches that a Trainer would take for it."""
    data = digits()
    sampler = DistributedSampler(
        data, fabric.world_size, fabric.global_rank, shuffle=True
    )  # as the Trainer puts one in
    loaded = fabric.setup_dataloaders(DataLoader(data, 16, sampler=sampler, drop_last=True))
    epochs = itertools.chain.from_iterable(itertools.repeat(loaded))
    batches = itertools.islice(epochs, begin * accumulate, steps * accumulate)
    for number, (images, labels) in enumerate(batches, 1):
        steps_now = number % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not steps_now) if accumulate > 1 else nullcontext():
            fabric.backward(nn.functional.cross_entropy(model(images), labels) / accumulate)
        if steps_now:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()


def quietly(function, *arguments, **options):
    """What a function returns, and the warnings about lost state or ignored arguments."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*arguments, **options)
    said = [str(each.message) for each in caught]
    return result, [each for each in said if "residual" in each or "begins again" in each or "bit for bit" in each]
