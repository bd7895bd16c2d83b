"""Gossip: what it does to accuracy, and what it costs on a slow link.

    python -m benchmarks.gossip accuracy --root data --csv docs/results/gossip_accuracy.csv --ranks 4,8 --seeds 0,1,2

    sudo python -m benchmarks.gossip network --ranks 8 --rate 100mbit --delays 0,10 --json gossip.json
    sudo python -m benchmarks.gossip network --ranks 8 --rate 100mbit --last 10mbit --delays 0     # uneven links
    python -m benchmarks.gossip memory                                 # bytes that each method keeps

For accuracy ranks are threads of one process. A run is a row of the CSV file, written when it ends; those that are
there are not run again, so that it may be interrupted. All methods have the same steps, batches, first weights and
learning rates. Titles of ``network`` say kappa, as those of ``benchmarks.network``.
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks._arguments import above_zero, described, file_to_write, plain_errors, positive, positives
from benchmarks._gossip import memory, network
from benchmarks._gossip.data import Pictures
from benchmarks._gossip.methods import METHODS
from benchmarks._gossip.training import Job, run
from benchmarks.harness.results import row_of
from benchmarks.harness.tables import show
from recipes.tables.rows import read_rows

GIVEN = ("ranks", "steps", "images", "batch", "rate")


def accuracy(told: argparse.Namespace) -> None:
    """Run what is missing in the CSV file, the first seed of all first, and print the tables."""
    data = None
    for size in told.ranks:
        for seed in map(int, told.seeds.split(",")):
            for method in told.methods or METHODS:
                data = data or Pictures(told.root, told.images, told.tested, told.batch)
                key = {"method": method, "ranks": size, "seed": seed}
                key |= {name: getattr(told, name) for name in GIVEN[1:]}
                job = Job(method, size, told.steps, seed, told.rate)
                row_of(told.csv, key, partial(trained, job, data))
    show_accuracy(read_rows(told.csv))


def trained(job: Job, data: Pictures) -> dict[str, float]:
    """What a run came to, as the CSV file has it."""
    found = run(job, data)
    stats = [each["stats"] for each in found]
    row = {
        "accuracy": round(found[0]["accuracy"], 2),
        "test_loss": round(found[0]["loss"], 4),
        "bytes_a_step": statistics.mean(each["sent"] for each in stats) / job.steps,
        "memory": stats[0]["memory"],
        "consensus": stats[0]["consensus_distance"],
        "hash_failures": sum(each.get("hash_failures", 0.0) for each in stats),
        "theta": stats[0].get("theta", 0.0),
        "seconds": round(max(each["seconds"] for each in found), 1),
    }
    print(f"{job.method}, {job.ranks} ranks, seed {job.seed}: {row['accuracy']} % in {row['seconds']} s", flush=True)
    return {name: float(f"{value:.6g}") for name, value in row.items()}


def show_accuracy(rows: list[dict[str, str]]) -> None:
    """Print a table for all runs that differ in method and seed alone."""
    by_given: dict[tuple[float, ...], list[dict[str, str]]] = {}
    for row in rows:
        by_given.setdefault(tuple(float(row[name]) for name in GIVEN), []).append(row)
    for (ranks, steps, images, batch, rate), alike in sorted(by_given.items()):
        title = f"ResNet-20, {images:,.0f} images of CIFAR-10, {ranks:.0f} ranks on a ring, {steps:.0f} steps"
        title += f" of {batch:.0f} images over all ranks, learning rate {rate:g}"
        head = ("method", "test accuracy, %", "seeds", "kB a rank and step", "bytes kept", "apart")
        own = {method: [row for row in alike if row["method"] == method] for method in METHODS}
        show(head, [_cells(method, found) for method, found in own.items() if found], title, width=110)


def _cells(method: str, own: list[dict[str, str]]) -> tuple[str, ...]:
    scores = [float(row["accuracy"]) for row in own]
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    apart = statistics.mean(float(row["consensus"]) for row in own)
    sent, kept = float(own[0]["bytes_a_step"]) / 1e3, float(own[0]["memory"])
    said = f"{apart:.2g}" if math.isfinite(apart) else "diverged"
    return method, f"{statistics.mean(scores):.1f}{spread}", str(len(own)), f"{sent:.0f}", f"{kept:.0f}", said


@plain_errors()
def main() -> None:
    """Run what the command line asks for."""
    told: Any = parse()
    torch.set_num_threads(1)
    {"accuracy": accuracy, "network": network.measure, "memory": memory.measure}[told.what](told)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = described(__doc__)
    parts = parser.add_subparsers(dest="what", required=True)
    large = parts.add_parser("accuracy", help="ResNet-20 on CIFAR-10")
    add = large.add_argument
    add("--root", type=Path, required=True, help="folder that holds cifar-10-batches-bin")
    add("--csv", type=Path, required=True, help="results so far")
    add("--methods", nargs="+", choices=METHODS)
    add("--ranks", type=positives, default=[4, 8], help="by commas (4,8)")
    add("--seeds", default="0,1,2", help="by commas")
    add("--steps", type=positive, default=800, help="optimizer steps of each rank")
    add("--images", type=positive, default=10_000, help="of the training set")
    add("--tested", type=positive, default=10_000, help="of the test set")
    add("--batch", type=positive, default=128, help="images a step, over all ranks")
    add("--rate", type=above_zero, default=0.1, help="the first learning rate; it falls to 0 as a cosine")
    links = parts.add_parser("network", help="steps over slow links, in the network lab")
    add = links.add_argument
    add("--ranks", type=positive, default=8)
    add("--rate", default="100mbit", help="of each link, as tc writes it")
    add("--last", help="of the last rank's link, if it is another one")
    add("--delays", default="0,10", help="milliseconds that a round trip takes at least, by commas")
    add("--numel", type=positive, default=269_722, help="parameters; ResNet-20 has 269,722, ResNet-110 1.7 million")
    add("--compute-ms", type=float, default=50.0, help="what a step computes, asleep")
    add("--steps", type=positive, default=64)
    add("--methods", nargs="+", choices=network.METHODS, default=list(network.METHODS))
    add("--json", type=file_to_write, help="write the figures here")
    state = parts.add_parser("memory", help="bytes for each parameter that a rank keeps between two rounds")
    state.add_argument("--ranks", type=positive, default=4)
    state.add_argument("--numel", type=positive, default=1 << 20, help="parameters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
