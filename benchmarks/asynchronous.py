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

import dataclasses
import statistics
from functools import partial
from pathlib import Path

from benchmarks._arguments import described, file_to_write, positive, positives
from benchmarks._gossip.data import Data, Digits, Pictures
from benchmarks._gossip.methods import ASYNCHRONOUS
from benchmarks._gossip.training import Job, run_as_processes
from benchmarks.harness.results import row_of
from benchmarks.harness.tables import show

SLEEP_S = 0.02
SLOW = 10.0
LINK_S = 0.5
KEYS = ("method", "ranks", "batches", "seed", "slow", "rate")
STRAGGLER_S = {False: 0.002, True: 0.2}
"""That a step sleeps where one rank is slow, about as long as it computes: digits, and ResNet-20 (True)."""


def straggler(ranks: list[int], seconds: float) -> None:
    """Print the steps a second of all ranks but the last, which is slow, behind a slow link, or neither."""
    rows, data = [], Digits()
    for size in ranks:
        for method in ASYNCHRONOUS:
            usual = Job(method, size, batches=1 << 30, seconds=seconds, sleep_s=SLEEP_S)
            waits = method == "D-PSGD"
            if waits:  # ranks that wait for each other have to end at the same step
                usual = dataclasses.replace(usual, batches=int(size * seconds / SLEEP_S / SLOW), seconds=0.0)
            speeds = [_speed(each, data) for each in (usual, dataclasses.replace(usual, slow=SLOW))]
            speeds += [] if waits else [_speed(dataclasses.replace(usual, link_s=LINK_S), data)]
            shares = [f"{each:.1f} ({100 * each / speeds[0]:.0f} %)" for each in speeds[1:]]
            rows.append((method, str(size), f"{speeds[0]:.1f}", *shares))
    head = ("method", "ranks", "steps a second", f"one rank {SLOW:g} x slower", f"its link {LINK_S:g} s slower")
    show(head, rows, f"a step sleeps {1e3 * SLEEP_S:g} ms; the others' steps, and the share that they keep")


def _speed(job: Job, data: Data) -> float:
    found = run_as_processes(job, data)
    others = zip(found["steps"][:-1], found["seconds"][:-1], strict=True)
    return statistics.mean(float(steps) / float(seconds) for steps, seconds in others)


def accuracy(path: Path, seeds: list[int], ranks: int, batches: int, rate: float, root: Path | None) -> None:
    """Train what is missing in the CSV file, and print means over the seeds, and differences from D-PSGD."""
    data = Pictures(root, shared=True) if root else Digits()
    groups: dict[tuple[str, float], list[tuple[float, float]]] = {}  # loss and accuracy, a seed each
    for seed in seeds:
        usual = {method: Job(method, ranks, batches, seed=seed, rate=rate) for method in ASYNCHRONOUS}
        straggling = dataclasses.replace(usual["AD-PSGD"], sleep_s=STRAGGLER_S[bool(root)], slow=SLOW)
        for job in (*usual.values(), straggling):
            row = row_of(path, {name: getattr(job, name) for name in KEYS}, partial(_trained, job, data))
            groups.setdefault((job.method, job.slow), []).append((float(row["loss"]), float(row["accuracy"])))
    losses_of_base, right_of_base = zip(*groups["D-PSGD", 1.0], strict=True)
    title, rows = f"{ranks} ranks, {batches} batches", []
    for (method, slower), found in groups.items():
        losses, right = zip(*found, strict=True)
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        over = statistics.mean(losses) / statistics.mean(losses_of_base) - 1
        each = ", ".join(f"{100 * (mine / base - 1):+.0f}" for mine, base in zip(losses, losses_of_base, strict=True))
        cells = (
            method + (f", one rank {slower:g} x slower" if slower != 1 else ""),
            f"{statistics.mean(losses):.4f}{spread}",
            f"{100 * over:+.1f} % ({each})",
            f"{statistics.mean(right):.2f}",
            f"{statistics.mean(right_of_base) - statistics.mean(right):.2f}",
        )
        rows.append(cells)
    show(("method", "loss", "over D-PSGD", "accuracy %", "points behind D-PSGD"), rows, title)


def _trained(job: Job, data: Data) -> dict[str, str]:
    found = run_as_processes(job, data)
    return {"loss": f"{found['loss']:.5f}", "accuracy": f"{found['accuracy']:.2f}"}


def main() -> None:
    """Run what the command line asks for."""
    parser = described(__doc__)
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
    arguments = parser.parse_args()
    if arguments.what == "straggler":
        straggler(arguments.ranks, arguments.seconds)
    else:
        seeds = [int(each) for each in arguments.seeds.split(",")]
        accuracy(arguments.csv, seeds, arguments.ranks, arguments.batches, arguments.rate, arguments.root)


if __name__ == "__main__":
    main()
