"""Processes that train by gossip, with a wait for each other or without: digits, or ResNet-20 on CIFAR-10."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._digits import digits
from benchmarks._gossip import training
from benchmarks.harness.launch import run_beside
from lightning_compress.contrib.asynchronous.async_gossip import AsyncGossip
from lightning_compress.contrib.asynchronous.pairwise import PairwiseAverage
from lightning_compress.core.random import mix
from lightning_compress.periodic.gossip import Gossip
from recipes.resnet.model import ResNet

METHODS: dict[str, dict[str, Any]] = {
    "D-PSGD": {},
    "AD-PSGD": {"compressor": None},
    "AD-PSGD, Moniqua 8 bits": {"compressor": "moniqua"},
    "AD-PSGD, Moniqua 4 bits": {"compressor": {"name": "moniqua", "bits": 4}},
}
"""Arguments of ``AsyncGossip``; none: ``Gossip``, whose ranks wait for each other in each step."""
TESTED = 500
"""Digits of the test set."""
BATCH = 128
"""Images of CIFAR-10 in a step of all ranks."""


@dataclass(frozen=True)
class Job:
    """One training run.

    Args:
        method: of ``METHODS``.
        ranks: processes, on a ring.
        batches: of all ranks together.
        seconds: after which the ranks stop, too; 0: never.
        seed: of weights and batches.
        sleep_s: that a batch takes besides, as if it took longer to compute.
        slow: by how much the last rank is slower.
        link_s: that a question of the last rank takes longer, and its answers, too.
        rate: the learning rate; ResNet-20's falls to 0 as a cosine, with the batches that all ranks have taken.
        root: holds CIFAR-10's binary files, for ResNet-20; None: handwritten digits.
    """

    method: str
    ranks: int = 4
    batches: int = 2400
    seconds: float = 0.0
    seed: int = 0
    sleep_s: float = 0.0
    slow: float = 1.0
    link_s: float = 0.0
    rate: float = 0.05
    root: Path | None = None


class Digits:
    """A network of 13,000 parameters on handwritten digits; a batch follows from its number alone."""

    decay, cosine = 0.0, False

    def __init__(self, seed: int) -> None:
        images, labels = digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self._images, self._labels, self._seed = images[order], labels[order], seed

    def network(self) -> nn.Module:
        """Return the same weights on all ranks."""
        torch.manual_seed(self._seed)
        return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))

    def batch(self, number: int, size: int = 16) -> tuple[Tensor, Tensor]:
        """Return the images and labels of a batch."""
        draw = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        rows = torch.randint(TESTED, len(self._labels), (size,), generator=draw)
        return self._images[rows], self._labels[rows]

    def test(self, model: nn.Module) -> tuple[float, float]:
        """Return loss, and percent that are right."""
        with torch.no_grad():
            scores = model(self._images[:TESTED])
        right = (scores.argmax(1) == self._labels[:TESTED]).float().mean()
        return float(F.cross_entropy(scores, self._labels[:TESTED])), 100 * float(right)


class Pictures:
    """ResNet-20 on 10,000 images of CIFAR-10, as ``benchmarks.gossip accuracy`` trains it."""

    decay, cosine = training.DECAY, True

    def __init__(self, root: Path, seed: int, ranks: int) -> None:
        self._data, self._seed, self._size = training.Task(root, 10_000, 10_000), seed, BATCH // ranks

    def network(self) -> nn.Module:
        """Return the same weights on all ranks."""
        model = ResNet(20)
        training.draw(model, self._seed)
        return model

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the images and labels of a batch."""
        return training.batch_of(self._data.train, self._size, mix(self._seed, number, 1))

    def test(self, model: nn.Module) -> tuple[float, float]:
        """Return loss, and percent that are right."""
        accuracy, loss = training.test(model, self._data.test)
        return loss, accuracy


def run(job: Job) -> dict[str, Any]:
    """Train; return ``steps`` and ``seconds`` by rank, and of the mean model ``loss`` and ``accuracy``.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the others are killed.
    """
    told = run_beside(job.ranks, _rank, job, start="fork")
    found: dict[str, Any] = {name: [each[name] for each in told] for name in ("steps", "seconds", "stats")}
    return {**found, **told[0]["test"]}


def _rank(job: Job) -> dict[str, Any]:
    rank = dist.get_rank()
    data = Pictures(job.root, job.seed, job.ranks) if job.root else Digits(job.seed)
    model = data.network()
    optimizer = torch.optim.SGD(model.parameters(), job.rate, momentum=0.9, weight_decay=data.decay)
    last = rank == job.ranks - 1
    if job.link_s and last:
        _slow_down(job.link_s)
    settings = METHODS[job.method]
    gossip = AsyncGossip(**settings, seed=job.seed) if settings else Gossip("dpsgd", compressor="none", seed=job.seed)
    gossip.start(model, [optimizer])
    dist.barrier()
    begun, steps = time.perf_counter(), 0
    if isinstance(gossip, AsyncGossip):
        gossip.resume()
    for number in _numbers(gossip, rank, job, begun):
        time.sleep(job.sleep_s * (job.slow if last else 1.0))
        if data.cosine:
            optimizer.param_groups[0]["lr"] = job.rate * (1 + math.cos(math.pi * number / job.batches)) / 2
        images, labels = data.batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        gossip.before_step(optimizer)
        optimizer.step()
        gossip.after_step()
        steps += 1
    seconds = time.perf_counter() - begun
    gossip.finish()
    loss, accuracy = (0.0, 0.0) if rank else data.test(model)  # all have the same model now
    figures = {name: each for name, each in gossip.stats().items() if isinstance(each, float)}
    gossip.close()
    return {"steps": steps, "seconds": seconds, "stats": figures, "test": {"loss": loss, "accuracy": accuracy}}


def _numbers(gossip: Gossip | AsyncGossip, rank: int, job: Job, begun: float) -> Iterator[int]:
    """Yield this rank's batches: those that no other has taken, or every so many."""
    number = rank
    while number < job.batches and not (job.seconds and time.perf_counter() - begun > job.seconds):
        yield number
        number = job.ranks - 1 + gossip.take(1) if isinstance(gossip, AsyncGossip) else number + job.ranks


def _slow_down(seconds: float) -> None:
    """Have this process's questions and answers take longer: half of it on the way there, half on the way back."""
    ask, answer = PairwiseAverage.ask, PairwiseAverage.answer

    def slow_ask(self: PairwiseAverage, *given: Any) -> bool:
        time.sleep(seconds)
        return ask(self, *given)

    def slow_answer(self: PairwiseAverage, *given: Any) -> Any:
        time.sleep(seconds)
        return answer(self, *given)

    patched: Any = PairwiseAverage
    patched.ask, patched.answer = slow_ask, slow_answer
