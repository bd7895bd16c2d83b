"""Distance from the optimum, epoch by epoch: SGD, QSGD, SVRG and QSVRG on a convex problem.

    python -m benchmarks.qsvrg
    python -m benchmarks.qsvrg --ranks 8 --csv qsvrg.csv --plot qsvrg.png
    python -m benchmarks.qsvrg --staleness 4 --rate 0.25

QSVRG (Alistarh et al., NIPS 2017, arXiv:1610.02132) is SVRG (Johnson and Zhang, NIPS 2013) whose ranks send their
corrected gradients through QSGD. The correction takes the same rows' gradient at the epoch's first point away, and adds
the full gradient there. So what is sent shrinks with the distance from the optimum, and with it the quantisation error:
a constant rate converges linearly. Without the correction, a constant rate ends at the noise of the minibatches. A
corrected step computes two gradients.

The problem is softmax regression on scikit-learn's digits with a squared penalty, 650 weights. Ranks are threads. Each
has its share of the rows. Gradients are encoded, travel by ``all_gather`` (float32: ``all_reduce``) and are decoded. An
epoch of SVRG begins with one full gradient in float32. Newton's method finds the optimum. With ``--staleness`` ranks do
not wait for each other in a step: each sends its steps to all others, and none is further ahead of the slowest than
that (``BoundedStaleness``). They meet at the end of an epoch.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks._arguments import above_zero, file_to_write, natural, plain_errors, positive
from lightning_compress.codecs import QSGD, Codec, Dense
from lightning_compress.collectives import Collective, CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.asynchronous.bounded_staleness import BoundedStaleness
from lightning_compress.contrib.asynchronous.links import Links
from lightning_compress.contrib.asynchronous.ssp import SSP
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.exchanges import AllGather, AllReduce
from lightning_compress.exchanges.message import Section

CPU = torch.device("cpu")
NEWTON_STEPS = 20
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


METHODS = {
    "SGD": Method(Dense(), False),
    "QSGD 4 bits": Method(QSGD(4), False),
    "SVRG": Method(Dense(), True),
    "QSVRG 6 bits, l2": Method(QSGD(6, bucket=1024, norm="l2"), True),  # 31 levels > sqrt(650), as the paper's theorem
    "QSVRG 4 bits": Method(QSGD(4), True),
}


@dataclass(frozen=True)
class Problem:
    """Softmax regression: mean cross-entropy plus ``penalty / 2`` times the squared weights.

    Args:
        rows: float64 ``[rows, features]``.
        labels: int64 ``[rows]``.
        penalty: of the weights; the problem is that strongly convex.
    """

    rows: Tensor
    labels: Tensor
    penalty: float

    @classmethod
    def of_digits(cls, ranks: int, penalty: float) -> Problem:
        """Return the problem on all digits that ``ranks`` ranks can share equally, in a fixed random order."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: len(labels) // ranks * ranks]
        rows = torch.cat([torch.from_numpy(pixels) / 8 - 1, torch.ones(len(labels), 1)], 1)
        return cls(rows[order], torch.from_numpy(labels)[order], penalty)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weights."""
        return self.rows.shape[1], int(self.labels.max()) + 1

    @cached_property
    def smoothness(self) -> float:
        """A bound of the Hessian's largest eigenvalue: softmax contributes at most half of the rows' own."""
        return float(torch.linalg.eigvalsh(self.rows.T @ self.rows / len(self.rows))[-1]) / 2 + self.penalty

    def value(self, weights: Tensor) -> Tensor:
        """Float64 scalar."""
        return F.cross_entropy(self.rows @ weights, self.labels) + self.penalty / 2 * weights.square().sum()

    def gradient(self, weights: Tensor, places: Tensor) -> Tensor:
        """Of the mean over these rows and the penalty."""
        rows = self.rows[places]
        excess = torch.softmax(rows @ weights, 1)
        excess[torch.arange(len(places)), self.labels[places]] -= 1
        return rows.T @ excess / len(places) + self.penalty * weights

    def hessian(self, weights: Tensor) -> Tensor:
        """Of all rows, ``[numel, numel]``."""
        shares = torch.softmax(self.rows @ weights, 1)
        curved = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
        of_rows = torch.einsum("ra,rb,rkl->akbl", self.rows, self.rows, curved) / len(self.rows)
        return of_rows.reshape(weights.numel(), -1) + self.penalty * torch.eye(weights.numel(), dtype=torch.float64)

    @cached_property
    def optimum(self) -> float:
        """The least value."""
        weights, every = torch.zeros(self.shape, dtype=torch.float64), torch.arange(len(self.rows))
        for _ in range(NEWTON_STEPS):
            step = torch.linalg.solve(self.hessian(weights), self.gradient(weights, every).flatten())
            weights -= step.view(self.shape)
            if float(step.norm()) < 1e-12:
                return float(self.value(weights))
        raise RuntimeError(f"Newton's method did not find the optimum in {NEWTON_STEPS} steps")


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


def draw(found: dict[str, list[float]], title: str, path: Path) -> None:
    """Write the picture, a PNG."""
    from recipes.tables.drawing import canvas, legend, save, styles

    figure, (axes,) = canvas(title, (7.4, 3.8))
    for name, style in styles(found).items():
        values = [max(value, 1e-16) for value in found[name]]
        axes.semilogy(range(1, len(values) + 1), values, ms=4, label=name, **style)
    axes.set(xlabel="epochs", ylabel="value above the optimum")
    legend(figure, axes)
    save(figure, path)


def write(found: dict[str, list[float]], bits: dict[str, float], path: Path) -> None:
    """Write a row for each method and epoch."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["method", "bits", "epoch", "above_optimum"])
        for name, each in found.items():
            rows.writerows([name, f"{bits[name]:.3f}", epoch, value] for epoch, value in enumerate(each, 1))


@plain_errors()
def main() -> None:
    """Train by every method and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=positive, default=4)
    add("--epochs", type=positive, default=Training.epochs)
    add("--steps", type=positive, default=Training.steps, help="of an epoch (default: %(default)s)")
    add("--batch", type=positive, default=Training.batch, help="rows of a rank and step (default: %(default)s)")
    add("--rate", type=above_zero, default=Training.rate, help="in units of 1 / smoothness (default: %(default)s)")
    add("--penalty", type=above_zero, default=0.1, help="of the squared weights (default: %(default)s)")
    add("--seed", type=natural, default=Training.seed)
    add("--staleness", type=natural, help="ranks may be so many steps ahead of the slowest; all at the same step")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--csv", type=file_to_write, help="write the figures here")
    add("--plot", type=file_to_write, help="draw them here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    problem = Problem.of_digits(given.ranks, given.penalty)
    training = Training(given.epochs, given.steps, given.batch, given.rate, given.seed)
    found, bits = {}, {}
    for name in given.methods:
        what = problem, METHODS[name], given.ranks, training
        late = given.staleness is not None
        found[name], bits[name] = late_distances(*what, given.staleness) if late else distances(*what)
    title = f"{given.ranks} ranks, condition number {problem.smoothness / problem.penalty:.0f}"
    title += f", at most {given.staleness} steps ahead" if given.staleness is not None else ""
    epochs = [str(epoch) for epoch in range(1, given.epochs + 1)]
    table = Table("method", "bits", *epochs, title=f"value above the optimum, by epoch: {title}")
    table.caption = "bits: what a rank sends for a weight and step, to all others together"
    for name, each in found.items():
        table.add_row(name, f"{bits[name]:.1f}", *(f"{value:.0e}" for value in each))
    Console(width=130).print(table)
    if given.csv:
        write(found, bits, given.csv)
    if given.plot:
        draw(found, title, given.plot)


if __name__ == "__main__":
    main()
