"""Averages that are applied one step later: delayed SGD, with every codec."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from tests.helpers.training import digits

ALL = {"name": "topk", "density": 1.0}
STEPS, RATE, MOMENTUM, BATCH = 30, 0.05, 0.9, 16


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))


def batches(rank, count):
    """Images and labels of a rank's batches."""
    images, labels = digits().tensors
    drawn = torch.Generator().manual_seed(rank)
    places = [torch.randint(len(images), (BATCH,), generator=drawn) for _ in range(count)]
    return [(images[each], labels[each]) for each in places]


def flat(model):
    return torch.cat([each.detach().flatten().clone() for each in model.parameters()])


def delayed_sgd(size, accumulate=1, steps=STEPS, delay=1, clip=None):
    """Parameters after each step of an optimizer that is given the mean gradient of the step before; one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    data = [batches(rank, steps * accumulate) for rank in range(size)]
    before, path = None, []
    for step in range(steps):
        gradients = []
        for own in data:
            optimizer.zero_grad()
            for images, labels in own[step * accumulate : (step + 1) * accumulate]:
                (nn.functional.cross_entropy(model(images), labels) / accumulate).backward()
            gradients.append([each.grad.clone() for each in model.parameters()])
        mean = [sum(each) / size for each in zip(*gradients, strict=True)]
        if (applied := before if delay else mean) is not None:
            for parameter, gradient in zip(model.parameters(), applied, strict=True):
                parameter.grad = gradient.clone()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        before = mean
        path.append(flat(model))
    return path


def train(compressor, delay=1, accumulate=1, steps=STEPS, scaler=None, ddp=(), **settings):
    """Parameters after each step on this rank, and the handle's last state."""
    model = DistributedDataParallel(network(), **{"bucket_cap_mb": 0.005, **dict(ddp)})
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    scale = lambda: getattr(scaler, "_scale", None)  # noqa: E731
    given = {"min_numel": 1, "delay": delay, "optimizer": optimizer, "scale": scale, **settings}
    compression = attach(model, compressor, **given)
    own, path = batches(dist.get_rank(), steps * accumulate), []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            images, labels = own[step * accumulate + part]
            with model.no_sync() if part + 1 < accumulate else nullcontext():
                loss = nn.functional.cross_entropy(model(images), labels) / accumulate
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        path.append(flat(model.module))
    stats = compression.stats()
    compression.close()
    return path, stats, compression.state_dict()


def path_of(*arguments, **named):
    return [each.numpy() for each in train(*arguments, **named)[0]]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compressor", ["none", ALL], ids=["none", "topk"])
def test_lossless_is_delayed_sgd_bit_for_bit(pools, compressor, accumulate):
    expected = [each.numpy() for each in delayed_sgd(2, accumulate)]
    for path in pools[2].run(path_of, compressor, 1, accumulate):
        assert all((ours == theirs).all() for ours, theirs in zip(path, expected, strict=True))
    undelayed = delayed_sgd(2, accumulate, delay=0)
    assert not (undelayed[-1].numpy() == expected[-1]).all()
