"""One training without a leader, on ranks that are threads."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks._gossip.data import Pictures
from benchmarks._gossip.methods import ALL_REDUCE, METHODS
from lightning_compress.collectives import Collective, run_threads
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.periodic.gossip import Gossip

DECAY = 5e-4
"""Of the weights."""


@dataclass(frozen=True)
class Job:
    """One training run.

    Args:
        method: of ``METHODS``.
        ranks: on a ring.
        steps: of each rank.
        seed: of weights and batches.
        rate: the learning rate at first; it falls to 0 as a cosine.
    """

    method: str
    ranks: int
    steps: int
    seed: int
    rate: float


class AllReduce:
    """All ranks' gradients are averaged in each step; to be called as ``Gossip`` is."""

    def start(self, model: nn.Module, optimizers: Sequence[object], ranks: Collective) -> None:
        """See ``Gossip``."""
        self._model, self._ranks, self._sent = model, ranks, 0

    def before_step(self, optimizer: object) -> None:
        """Average the gradients."""
        gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
        mean = torch.cat([each.view(-1) for each in gradients])
        self._ranks.all_reduce(mean)
        for gradient, part in zip(gradients, mean.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape) / self._ranks.size)
        self._sent += all_reduce_bytes(4 * len(mean), self._ranks.size)

    def after_step(self) -> None:
        """See ``Gossip``."""

    def finish(self) -> None:
        """Average BatchNorm's statistics."""
        for each in self._model.buffers():
            if each.is_floating_point():
                self._ranks.all_reduce(each)
                each /= self._ranks.size

    def stats(self) -> dict[str, Any]:
        """See ``Gossip``."""
        return {"bytes_to_all": float(self._sent), "consensus_distance": 0.0}

    def close(self) -> None:
        """See ``Gossip``."""


def build(method: str, seed: int) -> AllReduce | Gossip:
    """What averages, by the name of a method."""
    return AllReduce() if method == ALL_REDUCE else Gossip(**METHODS[method], seed=seed)


def run(job: Job, data: Pictures) -> list[dict[str, Any]]:
    """Train on ranks that are threads; returns what ``train`` says on each."""
    return run_threads(job.ranks, lambda ranks: train(job, data, ranks), timeout=3600)


def train(job: Job, data: Pictures, ranks: Collective) -> dict[str, Any]:
    """Train on one rank.

    Returns:
        ``seconds``; figures of the averaging (``stats``): with ``sent``, bytes to other ranks, and ``memory``, bytes
        for each parameter that are kept between two steps; and of rank 0 the mean model's ``loss`` and ``accuracy``.
    """
    model = data.network(job.seed)
    optimizer = torch.optim.SGD(model.parameters(), job.rate, momentum=0.9, weight_decay=DECAY)
    gossip = build(job.method, job.seed)
    gossip.start(model, [optimizer], ranks=ranks)
    ranks.all_reduce(torch.zeros(1))  # all are here
    begun = time.perf_counter()
    for step in range(job.steps):
        optimizer.param_groups[0]["lr"] = job.rate * (1 + math.cos(math.pi * step / job.steps)) / 2
        images, labels = data.batch(job.seed, step, ranks.rank, job.ranks)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        gossip.before_step(optimizer)
        optimizer.step()
        gossip.after_step()
    seconds = time.perf_counter() - begun
    sent = sum(each for name, each in gossip.stats().items() if name.startswith("bytes_to_"))
    kept = gossip.state_dict()["mixing"]["vectors"] if isinstance(gossip, Gossip) else {}
    gossip.finish()
    loss, accuracy = (0.0, 0.0) if ranks.rank else data.test(model)  # all have the same model now
    figures = {name: each for name, each in gossip.stats().items() if isinstance(each, float)}
    gossip.close()
    memory = 4 * sum(each.numel() for each in kept.values()) / sum(each.numel() for each in model.parameters())
    return {"seconds": seconds, "stats": figures | {"sent": sent, "memory": memory}, "loss": loss, "accuracy": accuracy}
