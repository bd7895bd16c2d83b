"""What local steps cost in held-out loss, next to methods that average in every step, at equal samples.

    python -m benchmarks.local --root data --json local.json
    python -m benchmarks.local --root data --json local.json --methods dense "diloco 30" --rates 0.01 --seeds 0
    python -m benchmarks.local --json local.json --csv docs/results/local_steps.csv --show

The character LSTM of ``benchmarks.optimizers`` on the English captions of Multi30k (``--root``), AdamW, a learning rate
that falls linearly to 0; every rank reads 16 excerpts of 64 characters a step. Every method has the same learning rates
to choose from, and its best counts: the mean of the seeds' held-out losses, over that of dense averaging at its own.
Runs that the JSON file has already are not repeated, so that it may be interrupted.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks._arguments import described
from benchmarks._local import LOCAL, ROTATED
from benchmarks.harness.results import Results, write_table
from benchmarks.harness.tables import show
from benchmarks.harness.tasks import Task
from benchmarks.harness.training import Run, descend, run_missing

METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "rotated 4": {"compressor": ROTATED},
    "powersgd 4": {"compressor": {"name": "powersgd", "rank": 4}},
    **{name: each for name, each in LOCAL.items() if name not in ("local_sgd 16 streaming", "diloco 30 streaming")},
    "topk 1/64 30": {**LOCAL["sparseloco 30"], "compressor": {"name": "topk", "density": 1 / 64}},
}
"""Arguments of ``attach``; with ``rounds``, of ``Local``."""
RATES, SEEDS, RANKS, STEPS = (5e-3, 1e-2, 2e-2), (0, 1), 4, 600


def train(run: Run, task: Task) -> dict[str, float]:
    """One run, on this rank; see ``descend``."""
    return descend(run, task, METHODS[run["method"]], lambda model, rate: torch.optim.AdamW(model.parameters(), rate))


def named(run: Run) -> Run:
    """A run, by the name that the results have for it."""
    return run | {"name": "{method}/{rate:g}/seed {seed}/{steps} steps".format(**run)}


def rows(results: Results, runs: list[Run]) -> list[dict[str, Any]]:
    """A row for each method: losses by rate, where all seeds are there, and its best over dense's best."""
    found = []
    for method in dict.fromkeys(run["method"] for run in runs):
        by_rate: dict[float, list[float]] = {}
        for run in runs:
            if run["method"] == method and (one := results.get(run["name"])):
                by_rate.setdefault(run["rate"], []).append(one["held_out"])
                ratio = one["ratio"]
        seeds = len({run["seed"] for run in runs})
        by_rate = {rate: losses for rate, losses in by_rate.items() if len(losses) == seeds}
        if by_rate:
            best = min(by_rate, key=lambda rate: statistics.mean(by_rate[rate]))
            row: dict[str, Any] = {"method": method, "best rate": best, "loss": statistics.mean(by_rate[best])}
            row |= {f"lr {rate:g}": " ".join(f"{each:.4f}" for each in losses) for rate, losses in by_rate.items()}
            found.append(row | {"fewer bytes": round(ratio, 1)})
    dense = next((row["loss"] for row in found if row["method"] == "dense"), None)
    return [row | {"over dense": round(row["loss"] / dense, 4) if dense else ""} for row in found]


def print_and_write(found: list[dict[str, Any]], path: Path | None) -> None:
    """Print the rows, and write them to a file."""
    columns = list(dict.fromkeys(column for row in found for column in row))
    cells = ((f"{row[each]:.4f}" if each == "loss" else str(row.get(each, "")) for each in columns) for row in found)
    show(columns, cells, f"character LSTM, AdamW, {RANKS} ranks: held-out loss by learning rate and seed")
    if path is not None:
        write_table(path, columns, ((row.get(each, "") for each in columns) for row in found))


def main() -> None:
    """Run what is missing in processes of one group, and print the table."""
    parser = described(__doc__)
    parser.add_argument("--root", type=Path, help="folder that holds multi30k")
    parser.add_argument("--json", type=Path, required=True, help="results so far; written after every run")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--csv", type=Path, help="written with the table")
    parser.add_argument("--show", action="store_true", help="only what is there already")
    given = parser.parse_args()
    runs = [
        named({"model": "lstm", "method": method, "rate": rate, "seed": seed, "steps": given.steps})
        for seed in given.seeds
        for rate in sorted(given.rates, key=lambda each: abs(each - 1e-2))
        for method in given.methods
    ]
    if not given.show:
        if given.root is None and any(run["name"] not in Results(given.json) for run in runs):
            parser.error("--root is needed to train")
        run_missing(RANKS, runs, given.root, given.json, train)
    print_and_write(rows(Results(given.json), runs), given.csv)


if __name__ == "__main__":
    main()
