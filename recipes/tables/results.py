"""Regenerate ``docs/results/``: every recipe, dense and compressed, at equal steps and seeds on two ranks.

    python -m recipes.tables.results --data data             # hours; what the CSV files have already is not run again
    python -m recipes.tables.results --quick                 # minutes, on embedded data, into outputs/results
    python -m recipes.tables.results --only resnet_cifar10   # one comparison of recipes/tables/results.yaml
    python -m recipes.tables.results --page                  # tables and plots of what there is, nothing is run
    python -m recipes.tables.results --data data --time      # only time the steps again, on an idle machine

What is compared is in ``recipes/tables/results.yaml``. Each run is ``python -m recipes.train`` in processes of its own
and one row of its comparison's CSV file, written when it ends: interrupt this whenever you like, and start it again.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

import lightning_compress
from recipes.config import composed
from recipes.tables import cells
from recipes.tables.comparison import Comparison, Run
from recipes.tables.lineage import exit_on_sigterm
from recipes.tables.record import writable, write_whole
from recipes.tables.results_page import write_page
from recipes.tables.rows import read_rows

__all__ = ["COLUMNS", "Comparison", "Run", "main", "pending", "read_rows", "read_table", "run_one", "write_rows"]

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".yaml")
QUIET = ["logger=none", "trainer.enable_checkpointing=false", "trainer.enable_progress_bar=false"]
"""Overrides that change nothing of the training, so that the tables leave them out."""
SHORT = [
    *("trainer.max_epochs=1", "trainer.limit_train_batches=70"),
    *("trainer.limit_val_batches=0", "trainer.limit_test_batches=1"),
    *("strategy.warmup_steps=null", "strategy.schedule=none"),
]
"""Overrides of a run of which only the time of a step is wanted, and that as it is after any warm-up."""
COLUMNS = (
    *("recipe", "data", "experiment", "method", "compressor", "settings", "seed", "ranks", "steps", "metric", "goal"),
    *("unit", "score", "val_loss", "bytes_per_step", "ratio", "step_ms", "seconds", "versions", "date", "command"),
)
"""Of a CSV file; ``command`` is what a run is known by."""


def read_table(path: Path = TABLE) -> list[Comparison]:
    """Read what is compared.

    Args:
        path: a YAML file like ``recipes/tables/results.yaml``.

    Raises:
        ValueError: a comparison has an unknown key or lacks one, or seeds of an unknown method.
    """
    known = {each.name for each in fields(Comparison)} - {"name"}
    table = cast("dict[str, dict[str, Any]]", OmegaConf.to_container(OmegaConf.load(path)))
    found = []
    for name, entry in table.items():
        wrong, missing = set(entry) - known, {"title", "run", "methods", "seeds"} - set(entry)
        if wrong or missing:
            said = [f"unknown {key}" for key in sorted(wrong)] + [f"no {key}" for key in sorted(missing)]
            raise ValueError(f"{path.name}, {name}: {', '.join(said)}; an entry has {', '.join(sorted(known))}")
        found.append(made := Comparison(name=name, **entry))
        if strange := set(made.more_seeds) - set(made.methods):
            methods = ", ".join(made.methods)
            raise ValueError(f"{path.name}, {name}: more_seeds of {', '.join(sorted(strange))}; its methods: {methods}")
    return found


def pending(comparisons: list[Comparison], data: Path | None, out: Path) -> list[Run]:
    """What no CSV file has yet: the first seed of every comparison, then the second of every one, and so on."""
    missing = []
    for comparison in comparisons:
        done = {row["command"] for row in read_rows(out / f"{comparison.name}.csv")}
        missing += [run for run in comparison.runs(data) if run.command not in done]
    return sorted(missing, key=lambda run: run.seed)  # stable: else in the table's order


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a CSV file at once, so that no interruption leaves a part of it."""
    with write_whole(path) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run_one(run: Run) -> dict[str, Any]:
    """Train in processes of its own.

    Returns:
        The run's row.

    Raises:
        RuntimeError: the training failed; the message ends with its last error.
    """
    chosen = choices(run)
    start = time.time()
    result = train(run, [])
    names = {key: chosen[key] or "" for key in ("recipe", "data", "experiment", "compressor")}
    said = {"method": run.method, "settings": shlex.join(run.settings), "seed": run.seed, "command": run.command}
    when = {"seconds": round(time.time() - start), "date": datetime.date.today().isoformat(), "versions": versions()}
    return names | said | figures(result) | when


def train(run: Run, more: list[str]) -> dict[str, Any]:
    """What ``recipes.train`` says of a run, with more overrides at its end; raises as :func:`run_one`."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = cells.run([*run.overrides, *run.private, *QUIET, *more], Path(folder))
    if outcome.result is None:
        raise RuntimeError(f"{run.command}: {outcome.failure}")
    return outcome.result


def retime(comparisons: list[Comparison], data: Path | None, out: Path) -> None:
    """Put the median of a few steps of each method, timed now, into the CSV files, in place of the long runs' own."""
    for comparison in comparisons:
        path = out / f"{comparison.name}.csv"
        rows, every = read_rows(path), comparison.runs(data)
        for run in every[: len(comparison.methods)]:
            short = SHORT
            step_ms = figures(train(run, short))["step_ms"]
            print(f"{comparison.name}, {run.method}: {step_ms} ms", flush=True)
            commands = {each.command for each in every if each.method == run.method}
            for row in rows:
                row["step_ms"] = step_ms if row["command"] in commands else row["step_ms"]
        write_rows(path, rows)


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """The columns that ``recipes.train`` measured, from its ``result.json``; the score as it prints it.

    The loss is that of the last validation, empty where there was none.
    """
    score, _, unit = result["written"].partition(" ")
    judged = {"metric": result["score"]["label"], "goal": result["score"]["goal"], "score": score, "unit": unit}
    judged["val_loss"] = f"{result['metrics']['val/loss']:.5f}" if "val/loss" in result["metrics"] else ""
    return judged | {
        **{key: round(result[key]) for key in ("ranks", "steps", "bytes_per_step")},
        **{key: round(result[key], 3) for key in ("ratio", "step_ms")},
    }


def choices(run: Run) -> dict[str, Any]:
    """The option of every group, by its name; what does not compose raises Hydra's own error."""
    return dict(composed([*run.overrides, *run.private, *QUIET]).hydra.runtime.choices)


def versions() -> str:
    """Of what decides the figures."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = f" ({git.stdout.strip()})" if git.returncode == 0 else ""
    return (
        f"lightning_compress {lightning_compress.__version__}{commit}, torch {torch.__version__}, "
        f"lightning {lightning.__version__}, Python {platform.python_version()}"
    )


def selected(table: list[Comparison], names: list[str], data: Path | None) -> Iterator[Comparison]:
    """Comparisons whose data is there; those left out are named, with what they need.

    Raises:
        ValueError: there is no comparison of that name.
    """
    if unknown := set(names) - {each.name for each in table}:
        raise ValueError(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(each.name for each in table)}")
    for comparison in table:
        if names and comparison.name not in names:
            continue
        if not comparison.needs or (data is not None and (data / comparison.needs).exists()):
            yield comparison
        else:
            print(f"{comparison.name} is left out: it needs --data, a folder with {comparison.needs}", flush=True)


def train_all(todo: list[Run], out: Path) -> list[str]:
    """Train one after the other, each run into its comparison's CSV file; return what went wrong, run by run."""
    for run in todo:
        choices(run)  # before hours are spent
    failed = []
    for number, run in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {run.command}", flush=True)
        try:
            row = run_one(run)
        except RuntimeError as error:
            failed.append(str(error))
            print(error, flush=True)
            continue
        path = out / f"{run.comparison}.csv"
        write_rows(path, [*read_rows(path), row])
        print(f"    {row['metric']} {row['score']} {row['unit']}, {row['ratio']} x, {row['seconds']} s", flush=True)
    return failed


def check_arguments(given: argparse.Namespace) -> None:
    """Refuse what does not go together, and a folder that is not there.

    Raises:
        ValueError: it is so.
    """
    if given.page and given.time:
        raise ValueError("--page runs nothing, and --time times steps; give one of them")
    if given.data and not given.data.is_dir():
        raise ValueError(
            f"--data {given.data}: there is no such folder; it holds the public data sets, "
            f"{', '.join(sorted({each.needs for each in read_table() if each.needs}))}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, then write the tables and plots; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the public data sets (cifar-10-batches-bin, ...)")
    parser.add_argument(
        "--out", type=Path, help="folder of the CSV files; default docs/results, quick: outputs/results"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="comparisons of results.yaml")
    parser.add_argument("--quick", action="store_true", help="minutes, on embedded data")
    parser.add_argument("--page", action="store_true", help="run nothing, write tables and plots of what there is")
    parser.add_argument("--time", action="store_true", help="time 60 steps of each method for the tables, and no more")
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of every rank: the same on any machine
    exit_on_sigterm()
    out = given.out or ROOT / ("outputs/results" if given.quick else "docs/results")
    data = given.data.resolve() if given.data else None
    try:
        check_arguments(given)
        writable(out)
        with FileLock(out / ".lock", timeout=0):
            table = [each.shortened() for each in read_table() if each.quick] if given.quick else read_table()
            chosen = [] if given.page else list(selected(table, given.only, data))
            if given.only and not (chosen or given.page):
                return 1
            if given.time:
                retime(chosen, data, out)
            failed = [] if given.time else train_all(pending(chosen, data, out), out)
            write_page(out, [(each, each.runs(data)) for each in table])
    except Timeout:
        print(f"{out}/.lock is held: another python -m recipes.tables.results writes there", file=sys.stderr)
        return 1
    except (ValueError, RuntimeError) as error:  # the latter of a training that was to be timed
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"{len(failed)} runs failed; see {out}/recipes.md" if failed else f"see {out}/recipes.md")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
