"""ResNet-20 on a part of CIFAR-10 by ranks that are threads: equal steps and batches for every method."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._gossip.methods import ALL_REDUCE, METHODS
from lightning_compress.collectives import Collective, run_threads
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.gossip.algorithm import Mixing
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import build_topology
from recipes.resnet.cifar10 import FOLDER, MEAN, STD, TEST_FILES, TRAIN_FILES, read_batches
from recipes.resnet.data import Split, crop_and_flip
from recipes.resnet.model import ResNet

MOMENTUM, DECAY = 0.9, 5e-4
Row = dict[str, Any]


class Task:
    """Training and test images, the same for all methods.

    Args:
        root: holds the folder of CIFAR-10's binary files.
        images: of the training set to use.
        tested: of the test set to use.
    """

    def __init__(self, root: Path, images: int, tested: int) -> None:
        train = read_batches(root / FOLDER, TRAIN_FILES[: -(-images // 10_000)])
        self.train = train.rows(0, images)
        self.test = read_batches(root / FOLDER, TEST_FILES).rows(0, tested)

    def share(self, rank: int, ranks: int) -> Split:
        """A rank's own images: no other rank has them."""
        return Split(self.train.images[rank::ranks], self.train.labels[rank::ranks])


def run(task: Task, method: str, ranks: int, seed: int, steps: int, batch: int, rate: float) -> Row:
    """Train by one method; what it came to, as rank 0 tells it."""
    start = time.perf_counter()
    found = run_threads(
        ranks, lambda collective: _rank(collective, task, method, seed, steps, batch // ranks, rate), timeout=3600
    )
    row = found[0] | {"bytes_a_step": sum(each["bytes_a_step"] for each in found) / ranks}
    row["hash_failures"] = sum(each["hash_failures"] for each in found)
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _rank(
    collective: Collective, task: Task, method: str, seed: int, steps: int, batch: int, rate: float
) -> dict[str, float]:
    model = ResNet(20)
    draw(model, seed)
    parameters = list(model.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach().clone()
    optimizer = torch.optim.SGD(parameters, rate, momentum=MOMENTUM, weight_decay=DECAY)
    mixing, neighbours = _mixing(collective, method, vector, seed)
    own, sent = task.share(collective.rank, collective.size), 0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        images, labels = batch_of(own, batch, mix(seed, step, collective.rank + 1))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if mixing is None:
            sent += _average_gradients(parameters, collective)
            optimizer.step()
            continue
        optimizer.step()
        if step % METHODS[method].get("every", 1) == 0:
            torch.cat([each.detach().view(-1) for each in parameters], out=vector)
            mixing.mix(vector, float(optimizer.param_groups[0]["lr"]))
            nn.utils.vector_to_parameters(vector.clone(), parameters)
    consensus = _mean_model(model, vector, collective, mixing)
    accuracy, loss_there = test(model, task.test) if collective.rank == 0 else (0.0, 0.0)
    return {
        "accuracy": round(accuracy, 2),
        "test_loss": round(loss_there, 4),
        "bytes_a_step": (neighbours.bytes_sent if mixing else sent) / steps,
        "memory": sum(4 * each.numel() for each in mixing.vectors.values()) / len(vector) if mixing else 0.0,
        "consensus": consensus,
        "hash_failures": mixing.figures().get("hash_failures", 0.0) if mixing else 0.0,
        "theta": mixing.figures().get("theta", 0.0) if mixing else 0.0,
    }


def draw(model: nn.Module, seed: int) -> None:
    """The same weights on all ranks, though threads share the generator that a model is drawn from."""
    generator = torch.Generator().manual_seed(seed)
    for each in model.modules():
        if isinstance(each, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(each.weight, nonlinearity="relu", generator=generator)


def _mixing(collective: Collective, method: str, vector: Tensor, seed: int) -> tuple[Mixing | None, Neighbours]:
    settings = METHODS[method]
    algorithm = build_algorithm(settings.get("algorithm", "dpsgd"))
    topology = algorithm.fit_topology(build_topology(settings.get("topology", "ring"), collective.size), None)
    neighbours = Neighbours(collective, topology)
    if method == ALL_REDUCE:
        return None, neighbours
    compressor = build_gossip_compressor(settings.get("compressor"), algorithm)
    layout = Layout.of([("parameters", (len(vector),))])
    return algorithm.begin(vector, neighbours, compressor, layout, seed), neighbours


def batch_of(split: Split, batch: int, key: int) -> tuple[Tensor, Tensor]:
    """Some images of a rank's own, drawn from this key: cropped, flipped and normalised."""
    generator = torch.Generator().manual_seed(key % 2**63)
    rows = torch.randint(len(split.labels), (batch,), generator=generator)
    bits = torch.randint(2**31, (batch,), generator=generator)
    return _normalised(crop_and_flip(split.images[rows], bits)), split.labels[rows]


def _normalised(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return ((images.float() / 255 - mean) / std).to(memory_format=torch.channels_last)  # a sixth faster


def _average_gradients(parameters: list[nn.Parameter], collective: Collective) -> int:
    gradient = torch.cat([each.grad.view(-1) for each in parameters if each.grad is not None])
    collective.all_reduce(gradient)
    start = 0
    for each in parameters:
        assert each.grad is not None
        each.grad.copy_(gradient[start : start + each.numel()].view(each.shape) / collective.size)
        start += each.numel()
    return all_reduce_bytes(4 * len(gradient), collective.size)


def _mean_model(model: nn.Module, vector: Tensor, collective: Collective, mixing: Mixing | None) -> float:
    """Leave the mean of all models, BatchNorm's statistics too; how far apart they were, relative to its norm."""
    tensors = [each.data for each in [*model.parameters(), *model.buffers()] if each.is_floating_point()]
    own = torch.cat([each.reshape(-1) for each in tensors])
    mean, count = own.clone(), len(vector)
    if mixing and (surplus := mixing.surplus()):
        mean[:count] += surplus[0]  # the weights sum to the number of ranks
    collective.all_reduce(mean)
    mean /= collective.size
    apart = (own[:count] - mean[:count]).double().square().sum()[None]
    collective.all_reduce(apart)
    for each, part in zip(tensors, mean.split([each.numel() for each in tensors]), strict=True):
        each.copy_(part.view(each.shape))
    return float((apart / collective.size).sqrt() / mean[:count].double().norm())


def test(model: nn.Module, split: Split) -> tuple[float, float]:
    """Accuracy in percent, and the mean loss."""
    model.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for start in range(0, len(split.labels), 500):
            part = split.rows(start, start + 500)
            logits = model(_normalised(part.images))
            right += int((logits.argmax(1) == part.labels).sum())
            loss += float(F.cross_entropy(logits, part.labels, reduction="sum"))
    return 100 * right / len(split.labels), loss / len(split.labels)
