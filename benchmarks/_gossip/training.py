"""One training without a leader, on ranks that are threads or processes, and with a wait for each other or without."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks._gossip.data import Data
from benchmarks._gossip.methods import ALL_REDUCE, ASYNCHRONOUS, METHODS
from benchmarks.harness.launch import run_beside
from lightning_compress.collectives import Collective, TorchCollective, run_threads
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.contrib.asynchronous.async_gossip import AsyncGossip
from lightning_compress.contrib.asynchronous.pairwise import PairwiseAverage
from lightning_compress.periodic.gossip import Gossip


@dataclass(frozen=True)
class Job:
    """One training run.

    Args:
        method: of ``METHODS`` or ``ASYNCHRONOUS``.
        ranks: on a ring.
        batches: of all ranks together.
        seconds: after which the ranks stop, too; 0: never.
        seed: of weights and batches.
        sleep_s: that a batch takes besides, as if it took longer to compute.
        slow: by how much the last rank is slower.
        link_s: that a question of the last rank takes longer, and its answers, too.
        rate: the learning rate at first.
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


def build(method: str, seed: int) -> AllReduce | Gossip | AsyncGossip:
    """What averages, by the name of a method."""
    if method == ALL_REDUCE:
        return AllReduce()
    settings = (METHODS | ASYNCHRONOUS)[method]
    kind = AsyncGossip if settings["algorithm"] == "adpsgd" else Gossip
    return kind(**settings, seed=seed)


def run_as_threads(job: Job, data: Data) -> dict[str, Any]:
    """Train on ranks that are threads; see ``train``."""
    return _together(run_threads(job.ranks, lambda ranks: train(job, data, ranks), timeout=3600))


def run_as_processes(job: Job, data: Data) -> dict[str, Any]:
    """Train on ranks that are forks of this process; see ``train``.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the others are killed.
    """
    return _together(run_beside(job.ranks, train, job, data, start="fork"))


def _together(told: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: [each[name] for each in told] for name in ("steps", "seconds", "stats")}
    return {**found, **told[0]["test"]}


def train(job: Job, data: Data, ranks: Collective | None = None) -> dict[str, Any]:
    """Train on one rank.

    Args:
        job: what.
        data: with what.
        ranks: all of them; None: those of torch.distributed.

    Returns:
        ``steps`` and ``seconds``; figures of the averaging (``stats``): with ``sent``, bytes to other ranks, and
        ``memory``, bytes for each parameter that are kept between two steps; and of rank 0's ``test`` of the mean model
        ``loss`` and ``accuracy``.
    """
    ranks = ranks or TorchCollective()
    rank, last = ranks.rank, ranks.rank == job.ranks - 1
    model = data.network(job.seed)
    optimizer = torch.optim.SGD(model.parameters(), job.rate, momentum=0.9, weight_decay=data.decay)
    if job.link_s and last:
        _slow_down(job.link_s)
    gossip = build(job.method, job.seed)
    gossip.start(model, [optimizer], ranks=ranks)
    ranks.all_reduce(torch.zeros(1))  # all are here
    begun, steps, first = time.perf_counter(), 0, rank  # ranks that wait for each other have the same learning rate
    if isinstance(gossip, AsyncGossip):
        first = 0
        gossip.resume()
    for number in _numbers(gossip, rank, job, begun):
        time.sleep(job.sleep_s * (job.slow if last else 1.0))
        if data.cosine:
            optimizer.param_groups[0]["lr"] = job.rate * (1 + math.cos(math.pi * (number - first) / job.batches)) / 2
        images, labels = data.batch(job.seed, number, rank, job.ranks)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        gossip.before_step(optimizer)
        optimizer.step()
        gossip.after_step()
        steps += 1
    seconds = time.perf_counter() - begun
    sent = sum(each for name, each in gossip.stats().items() if name.startswith("bytes_to_"))
    kept = gossip.state_dict()["mixing"]["vectors"] if isinstance(gossip, Gossip) else {}
    gossip.finish()
    loss, accuracy = (0.0, 0.0) if rank else data.test(model)  # all have the same model now
    figures = {name: each for name, each in gossip.stats().items() if isinstance(each, float)}
    gossip.close()
    memory = 4 * sum(each.numel() for each in kept.values()) / sum(each.numel() for each in model.parameters())
    figures |= {"sent": sent, "memory": memory}
    return {"steps": steps, "seconds": seconds, "stats": figures, "test": {"loss": loss, "accuracy": accuracy}}


def _numbers(gossip: object, rank: int, job: Job, begun: float) -> Iterator[int]:
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
