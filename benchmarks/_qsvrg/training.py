"""Ranks that are threads train on the problem, by each method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks._qsvrg.problem import Problem
from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import Collective, CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.asynchronous.bounded_staleness import BoundedStaleness
from lightning_compress.contrib.asynchronous.links import Links
from lightning_compress.contrib.asynchronous.ssp import SSP
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.exchanges import AllGather, AllReduce
from lightning_compress.exchanges.message import Section
from lightning_compress.planning import choose  # noqa: F401  # has the exchange that SSP's settings name

CPU = torch.device("cpu")
FLAG = torch.tensor(0.0)


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Args:
        codec: of the stochastic gradients.
        corrects: SVRG's correction by the full gradient at the epoch's first point.
    """

    codec: Codec
    corrects: bool


class Average:
    """Averages float64 matrices over the ranks: each rank's own, as the codec sends it in float32.

    Args:
        codec: of the messages.
        shape: of the matrices.
        world: the ranks.
    """

    def __init__(self, codec: Codec, shape: tuple[int, int], world: World) -> None:
        layout = Layout.of([("weights", shape)])
        exchange = AllReduce() if isinstance(codec, Dense) else AllGather()
        self._plan = exchange.plan([Section(codec, layout, 0)], world)
        self._out = torch.empty(layout.numel)

    def __call__(self, own: Tensor, key: int) -> Tensor:
        """Return the mean; what a message leaves of the rank's own matrix is dropped."""
        self._plan.mean(own.float().flatten(), self._out, key, FLAG)
        return self._out.double().view(own.shape)


@dataclass(frozen=True)
class Training:
    """How each method trains.

    Args:
        epochs: as many distances are returned.
        steps: of an epoch.
        batch: rows of a rank and step.
        rate: learning rate, times the problem's smoothness.
        seed: of rows that are drawn, and of random rounding.
    """

    epochs: int = 9
    steps: int = 180
    batch: int = 8
    rate: float = 1.0
    seed: int = 0


def corrected(problem: Problem, weights: Tensor, drawn: Tensor, first: Tensor, full: Tensor | None) -> Tensor:
    """Return the gradient of the drawn rows.

    Args:
        problem: whose gradient.
        weights: where.
        drawn: rows.
        first: the epoch's first point.
        full: the gradient of all rows there; None: without a correction.
    """
    gradient = problem.gradient(weights, drawn)
    return gradient if full is None else gradient + full - problem.gradient(first, drawn)


def distances(problem: Problem, method: Method, ranks: int, training: Training) -> tuple[list[float], float]:
    """Train on so many thread ranks.

    Returns:
        the value above the optimum after each epoch, and the bits that a rank sent for a weight and step.
    """

    def program(collective: Collective) -> tuple[list[float], float]:
        meter = Meter(CPU)
        world = World(CountingCollective(collective, meter), CPU, meter)
        mean, exact = (Average(codec, problem.shape, world) for codec in (method.codec, Dense()))
        own = torch.arange(collective.rank, len(problem.rows), ranks)
        drawing = torch.Generator().manual_seed(mix(training.seed, collective.rank))
        weights, found = torch.zeros(problem.shape, dtype=torch.float64), []
        for epoch in range(training.epochs):
            first = weights.clone()
            full = exact(problem.gradient(first, own), 0) if method.corrects else None
            for step in range(training.steps):
                drawn = own[torch.randint(len(own), (training.batch,), generator=drawing)]
                gradient = corrected(problem, weights, drawn, first, full)
                weights -= training.rate / problem.smoothness * mean(gradient, mix(training.seed, epoch, step))
            found.append(float(problem.value(weights)) - problem.optimum)
        return found, 8 * meter.bytes_sent / weights.numel() / (training.epochs * training.steps)

    problem.optimum, problem.smoothness  # noqa: B018  # once, and not in each thread
    return run_threads(ranks, program)[0]


def late_distances(
    problem: Problem, method: Method, ranks: int, training: Training, staleness: int
) -> tuple[list[float], float]:
    """Train on so many thread ranks that wait for each other only if one is too far ahead; see ``distances``."""
    settings = SSP(staleness, method.codec, training.seed, error_feedback=False, min_numel=1)

    def program(collective: Collective) -> tuple[list[float], float]:
        own = torch.arange(collective.rank, len(problem.rows), ranks)
        drawing = torch.Generator().manual_seed(mix(training.seed, collective.rank))
        weights, found = torch.zeros(problem.shape), []
        running = BoundedStaleness({"weights": weights}, settings, collective.rank, ranks)
        others = [rank for rank in range(ranks) if rank != collective.rank]
        links = Links(collective, others, running.answer, running.kinds, 60.0, CPU)
        running.connect(links)
        for _ in range(training.epochs):
            first, full = weights.double(), problem.gradient(weights.double(), own)
            collective.all_reduce(full)
            for _ in range(training.steps):
                running.wait()
                drawn = own[torch.randint(len(own), (training.batch,), generator=drawing)]
                mean = full / ranks if method.corrects else None
                gradient = corrected(problem, weights.double(), drawn, first, mean)
                running.begin()
                weights -= (training.rate / problem.smoothness * gradient).float()
                running.end()
            running.pause()
            running.agree(collective)
            running.resume()
            found.append(float(problem.value(weights.double())) - problem.optimum)
        sent = sum(links.sent.values())
        collective.all_reduce(torch.zeros(1))  # the others may still read
        running.close()
        links.close()
        return found, 8 * sent / weights.numel() / (training.epochs * training.steps)

    problem.optimum, problem.smoothness  # noqa: B018  # once, and not in each thread
    return run_threads(ranks, program, timeout=600)[0]
