"""Bounded staleness: what it saves where steps take different times, and what it costs in loss, by codec.

    python -m benchmarks.staleness pace
    python -m benchmarks.staleness codecs --staleness 0 4 --steps 150

Ranks are threads, connected by sockets. They train a small network on handwritten digits, and each step also sleeps: so
many milliseconds, and now and then a multiple of that (``pace``), at random but equal for every staleness. Another row
has one rank that is slow in all steps. Times are ratios within one run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks._arguments import plain_errors, positive
from benchmarks._digits import digits
from lightning_compress.collectives import Collective, run_threads
from lightning_compress.contrib.asynchronous.bounded_staleness import BoundedStaleness
from lightning_compress.contrib.asynchronous.links import Links
from lightning_compress.contrib.asynchronous.ssp import SSP

CPU = torch.device("cpu")
BATCH, WIDTH, MOMENTUM = 16, 64, 0.9
SHARE, TIMES = 0.1, 10.0
"""How many of the steps are slow, and how many times as long they take."""
CODECS: dict[str, Any] = {
    "none": "none",
    "rotated 4 bits": {"name": "rotated", "bits": 4},
    "qsgd 4 bits": "qsgd",
    "onebit": "onebit",
    "topk 1 %": "topk",
}
Sleep = Callable[[int, torch.Generator], float]
"""Gets the rank and its random numbers, and returns the seconds that its next step sleeps."""


class Run(NamedTuple):
    """What one rank tells of a run.

    Attributes:
        seconds: of all its steps.
        waited: seconds of these in which it waited for others.
        lead: steps that it was ahead of the slowest, on average.
        loss: of the models' mean at the end, on the training set.
        sent: bytes to one other rank in a step.
    """

    seconds: float
    waited: float
    lead: float
    loss: float
    sent: float


def train(settings: SSP, ranks: int, steps: int, rate: float, seed: int, sleep: Sleep) -> Run:
    """Train on some ranks; the means of what they tell, and the seconds of the slowest."""
    found = run_threads(ranks, lambda own: _rank(own, settings, steps, rate, seed, sleep), timeout=600)
    means = Run(*(sum(column) / ranks for column in zip(*found, strict=True)))
    return means._replace(seconds=max(run.seconds for run in found))


def _rank(ranks: Collective, settings: SSP, steps: int, rate: float, seed: int, sleep: Sleep) -> Run:
    images, labels = digits()
    net = _net(seed)
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=MOMENTUM)
    draw, coin = (torch.Generator().manual_seed(1000 * seed + 2 * ranks.rank + which) for which in (0, 1))
    method = BoundedStaleness(dict(net.named_parameters()), settings, ranks.rank, ranks.size)
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    links = Links(ranks, others, method.answer, method.kinds, 60.0, CPU)
    method.connect(links)
    ranks.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    for _ in range(steps):
        method.wait()
        picked = torch.randint(len(images), (BATCH,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[picked]), labels[picked]).backward()
        time.sleep(sleep(ranks.rank, coin))
        method.begin()
        optimizer.step()
        method.end()
    seconds, waited = time.perf_counter() - began, method.waited
    method.pause()
    method.agree(ranks)
    method.close()
    links.close()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(net(images), labels))
    return Run(seconds, waited, method.figures()["staleness"], loss, sum(links.sent.values()) / len(others) / steps)


def _net(seed: int) -> nn.Module:
    """The same on all ranks, which are threads with one random state."""
    drawn = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    with torch.no_grad():
        for each in net.parameters():
            each.uniform_(-(each.shape[-1] ** -0.5), each.shape[-1] ** -0.5, generator=drawn)
    return net


def pace(ranks: int, staleness: list[int], steps: int, rate: float, milliseconds: float) -> Table:
    """Time by staleness, with steps that are slow at random, and with a rank that always is."""
    base = milliseconds / 1e3

    def at_random(_: int, coin: torch.Generator) -> float:
        return base * (TIMES if float(torch.rand((), generator=coin)) < SHARE else 1.0)

    def one_rank(rank: int, _: torch.Generator) -> float:
        return base * (TIMES if rank == ranks - 1 else 1.0)

    table = Table("slow", "staleness", "time", "share of it waiting", "mean lead", "loss")
    for name, sleep, count in (("steps at random", at_random, steps), ("one rank, always", one_rank, steps // 4)):
        first: Run | None = None
        for each in staleness:
            run = train(SSP(each), ranks, count, rate, 0, sleep)
            first = first or run
            row = f"{run.seconds / first.seconds:.2f}", f"{run.waited / run.seconds:.0%}", f"{run.lead:.1f}"
            table.add_row(name, str(each), *row, f"{run.loss:.4f}")
    return table


def codecs(ranks: int, staleness: list[int], steps: int, rate: float, milliseconds: float, seeds: int) -> Table:
    """Loss and bytes by codec and staleness; steps take between no time and twice the given."""

    def any_time(_: int, coin: torch.Generator) -> float:
        return 2e-3 * milliseconds * float(torch.rand((), generator=coin))

    table = Table("codec", "staleness", "loss", "against none", "bytes to each rank in a step")
    for each in staleness:
        dense = 0.0
        for name, compressor in CODECS.items():
            settings = SSP(each, compressor, min_numel=100)
            runs = [train(settings, ranks, steps, rate, seed, any_time) for seed in range(seeds)]
            loss = sum(run.loss for run in runs) / seeds
            dense = dense or loss
            table.add_row(name, str(each), f"{loss:.4f}", f"{loss / dense - 1:+.0%}", f"{runs[0].sent:,.0f}")
    return table


@plain_errors()
def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pace", "codecs"])
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--steps", type=positive, default=100, help="of each rank; a quarter where one is slow")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate of SGD with momentum")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="that a step sleeps")
    parser.add_argument("--seeds", type=positive, default=1, help="over which losses are averaged (codecs)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    given = arguments.ranks, arguments.staleness, arguments.steps, arguments.rate, arguments.milliseconds
    table = pace(*given) if arguments.what == "pace" else codecs(*given, arguments.seeds)
    Console().print(table)


if __name__ == "__main__":
    main()
