"""The table of accuracies: runs that are missing, a row of a CSV file each."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._gossip.methods import METHODS
from benchmarks._gossip.training import Task, run
from benchmarks._runs import append
from recipes.tables.rows import read_rows

KEYS = ("method", "ranks", "seed", "steps", "images", "batch", "rate")
FOUND = ("accuracy", "test_loss", "bytes_a_step", "memory", "consensus", "hash_failures", "theta", "seconds")


def known(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows so far, by what was run."""
    return {tuple(row[key] for key in KEYS): row for row in read_rows(path)}


def measure(path: Path, root: Path, methods: list[str], ranks: list[int], seeds: list[int], **given: Any) -> None:
    """Run what is missing, the first seed of all first, and print the table."""
    task: Task | None = None
    for size in ranks:
        for seed in seeds:
            for method in methods:
                what = {"method": method, "ranks": size, "seed": seed, **{key: given[key] for key in KEYS[3:]}}
                if tuple(map(str, what.values())) in known(path):
                    continue
                task = task or Task(root, given["images"], given["tested"])
                found = run(task, method, size, seed, given["steps"], given["batch"], given["rate"])
                append(path, what | {name: _short(found[name]) for name in FOUND})
                print(f"{method}, {size} ranks, seed {seed}: {found['accuracy']} % in {found['seconds']} s", flush=True)
    show(path)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _given(row: dict[str, str]) -> tuple[float, ...]:
    return tuple(float(row[key]) for key in ("ranks", "steps", "images", "batch", "rate"))


def show(path: Path) -> None:
    """A table for all runs that differ in method and seed alone."""
    rows = list(known(path).values())
    for given in sorted({_given(row) for row in rows}):
        ranks, steps, images, batch, rate = given
        title = f"ResNet-20, {images:,.0f} images of CIFAR-10, {ranks:.0f} ranks on a ring, {steps:.0f} steps"
        title += f" of {batch:.0f} images over all ranks, learning rate {rate:g}"
        table = Table("method", "test accuracy, %", "seeds", "kB a rank and step", "bytes kept", "apart", title=title)
        for method in METHODS:
            own = [row for row in rows if row["method"] == method and _given(row) == given]
            if own:
                scores = [float(row["accuracy"]) for row in own]
                spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
                apart = statistics.mean(float(row["consensus"]) for row in own)
                table.add_row(
                    method,
                    f"{statistics.mean(scores):.1f}{spread}",
                    str(len(own)),
                    f"{float(own[0]['bytes_a_step']) / 1e3:.0f}",
                    f"{float(own[0]['memory']):.0f}",
                    f"{apart:.2g}" if math.isfinite(apart) else "diverged",
                )
        Console(width=110).print(table)
