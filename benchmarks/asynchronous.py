"""Gossip without waiting: what a slow rank costs the others, and what it does to the loss.

    python -m benchmarks.asynchronous straggler --ranks 4,8 --seconds 20
    python -m benchmarks.asynchronous accuracy --seeds 0,1,2,3,4 --csv docs/results/async_digits.csv
    python -m benchmarks.asynchronous accuracy --root data --rate 0.1 --batches 1200 --csv async_cifar10.csv

Ranks are processes on one machine. Computing is emulated by a sleep, so that as many ranks as you like have a core
each. All methods have the same weights at first, the same batches and the same rate. ``accuracy`` trains a network of
13,000 parameters on handwritten digits until all ranks together have had as many batches; a run is a row of the CSV
file, and is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks._arguments import file_to_write, positive, positives
from benchmarks._asynchronous.ranks import METHODS, Job, run
from benchmarks._runs import append
from recipes.tables.rows import read_rows

SLEEP_S = 0.02
SLOW = 10.0
LINK_S = 0.5


def straggler(ranks: list[int], seconds: float, out: Console) -> None:
    """Print the steps a second of all ranks but the last, which is slow, behind a slow link, or neither."""
    table = Table("method", "ranks", "steps a second", f"one rank {SLOW:g} x slower", f"its link {LINK_S:g} s slower")
    table.title = f"a step sleeps {1e3 * SLEEP_S:g} ms; the others' steps, and the share that they keep"
    for size in ranks:
        for method, settings in METHODS.items():
            usual = Job(method, size, batches=1 << 30, seconds=seconds, sleep_s=SLEEP_S)
            if not settings:  # ranks that wait for each other have to end at the same step
                usual = dataclasses.replace(usual, batches=int(size * seconds / SLEEP_S / SLOW), seconds=0.0)
            slow = dataclasses.replace(usual, slow=SLOW)
            speeds = [_speed(each) for each in (usual, slow)]
            speeds += [_speed(dataclasses.replace(usual, link_s=LINK_S))] if settings else []
            shares = [f"{each:.1f} ({100 * each / speeds[0]:.0f} %)" for each in speeds[1:]]
            table.add_row(method, str(size), f"{speeds[0]:.1f}", *shares)
    out.print(table)


def _speed(job: Job) -> float:
    found = run(job)
    others = zip(found["steps"][:-1], found["seconds"][:-1], strict=True)
    speeds = [float(steps) / float(seconds) for steps, seconds in others]
    return statistics.mean(speeds)


KEYS = ("method", "ranks", "batches", "seed", "slow", "rate")


STRAGGLER_S = {False: 0.002, True: 0.2}
"""That a step sleeps where one rank is slow, about as long as it computes: digits, and ResNet-20 (True)."""


def accuracy(
    path: Path, seeds: list[int], ranks: int, batches: int, rate: float, root: Path | None, out: Console
) -> None:
    """Train what is missing in the CSV file, and print means over the seeds, and differences from D-PSGD."""
    jobs = list[Job]()
    for seed in seeds:
        usual = {method: Job(method, ranks, batches, seed=seed, rate=rate, root=root) for method in METHODS}
        straggling = dataclasses.replace(usual["AD-PSGD"], sleep_s=STRAGGLER_S[bool(root)], slow=SLOW)
        jobs += [*usual.values(), straggling]
    rows = {tuple(row[key] for key in KEYS): row for row in read_rows(path)}
    groups: dict[tuple[str, float], list[tuple[float, float]]] = {}  # loss and accuracy, a seed each
    for job in jobs:
        row = rows.get(tuple(str(getattr(job, name)) for name in KEYS)) or _train(job, path)
        groups.setdefault((job.method, job.slow), []).append((float(row["loss"]), float(row["accuracy"])))
    table = Table("method", "loss", "over D-PSGD", "accuracy %", "points behind D-PSGD")
    table.title = f"{ranks} ranks, {batches} batches"
    losses_of_base, right_of_base = zip(*groups["D-PSGD", 1.0], strict=True)
    for (method, slower), found in groups.items():
        losses, right = zip(*found, strict=True)
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        over = statistics.mean(losses) / statistics.mean(losses_of_base) - 1
        each = ", ".join(f"{100 * (mine / base - 1):+.0f}" for mine, base in zip(losses, losses_of_base, strict=True))
        table.add_row(
            method + (f", one rank {slower:g} x slower" if slower != 1 else ""),
            f"{statistics.mean(losses):.4f}{spread}",
            f"{100 * over:+.1f} % ({each})",
            f"{statistics.mean(right):.2f}",
            f"{statistics.mean(right_of_base) - statistics.mean(right):.2f}",
        )
    out.print(table)


def _train(job: Job, path: Path) -> dict[str, str]:
    found = run(job)
    row = {name: str(getattr(job, name)) for name in KEYS}
    row |= {"loss": f"{found['loss']:.5f}", "accuracy": f"{found['accuracy']:.2f}"}
    append(path, row)
    return row


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    slow = parts.add_parser("straggler", help="what a slow rank costs the others")
    slow.add_argument("--ranks", type=positives, default=[4, 8], help="by commas (4,8)")
    slow.add_argument("--seconds", type=float, default=20.0, help="of each run (%(default)s)")
    equal = parts.add_parser("accuracy", help="loss after as many batches")
    equal.add_argument("--csv", type=file_to_write, required=True, help="results so far")
    equal.add_argument("--seeds", default="0,1,2,3,4", help="by commas (%(default)s)")
    equal.add_argument("--ranks", type=positive, default=4)
    equal.add_argument("--batches", type=positive, default=2400, help="of all ranks together (%(default)s)")
    equal.add_argument("--rate", type=float, default=0.05)
    equal.add_argument("--root", type=Path, help="folder that holds cifar-10-batches-bin: train ResNet-20")
    arguments, out = parser.parse_args(), Console()
    if arguments.what == "straggler":
        straggler(arguments.ranks, arguments.seconds, out)
    else:
        seeds = [int(each) for each in arguments.seeds.split(",")]
        given = arguments.ranks, arguments.batches, arguments.rate, arguments.root
        accuracy(arguments.csv, seeds, *given, out)


if __name__ == "__main__":
    main()
