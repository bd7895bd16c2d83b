"""Run the cells of a sweep here, one after another, without W&B.

    python -m recipes.tables.sweep recipes/resnet/sweeps/topk_density.yaml data.root=data trainer.max_epochs=3

Overrides after the file go to every cell, and are stronger than the file's. Each cell is a process of its own, with its
folder below ``outputs/sweeps/<recipe>_<file>``; beside them grow ``cells.csv``, where each row says such overrides, and
``cells.png`` of the cells with those given. Called again, it goes on with the cells that are missing; ``--again`` tries
those that failed, too.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from hydra.errors import HydraException

from recipes.config import composed
from recipes.tables.cells import Cell, Outcome, Sweep, overrides, read_sweep, run, spelled
from recipes.tables.record import FILE, writable, write_whole

__all__ = ["main", "plot", "run_cells"]

FIGURES = ("ratio", "bytes_per_step", "total_bytes_sent", "step_ms", "seconds", "steps")
"""Of ``result.json``, in the table."""
FAILED = "failed"


def identity(arguments: Iterable[str]) -> str:
    """What tells cells apart: a digest of their overrides."""
    return hashlib.sha256(json.dumps(list(arguments)).encode()).hexdigest()[:10]


def run_cells(sweep: Sweep, extra: list[str], folder: Path, *, again: bool = False) -> list[dict[str, str]]:
    """Run what is missing, and write the table after each cell.

    Args:
        sweep: what to run.
        extra: overrides for every cell, stronger than the sweep's own.
        folder: of the table and the cells' folders.
        again: cells that failed are tried once more.

    Returns:
        The table's rows.

    Raises:
        ValueError: the sweep cannot run here, a cell is no config, the folder holds the table of another one, or cannot
            be written, or the first run has no metric of the sweep's name.
    """
    cells = [(cell, _arguments(sweep, cell, extra)) for cell in sweep.cells()]
    for cell, arguments in cells:  # before any of them takes its time
        try:
            composed(arguments)
        except HydraException as error:
            line = " ".join(str(error).split())
            raise ValueError(f"{sweep.path}: {spelled(cell)} is no setting of a run: {line}") from error
    writable(folder)
    table = folder / "cells.csv"
    columns = ["cell", "overrides", *sweep.axes, "status", "metric", "value", "score", *FIGURES, "failure"]
    done = _read(table, columns)
    rows: list[dict[str, str]] = []
    for number, (cell, arguments) in enumerate(cells, 1):
        key, said = identity(arguments), f"cell {number} of {len(cells)}: {spelled(cell)}"
        if key in done and not (again and done[key]["status"] == FAILED):
            print(f"{said}: {done[key]['status']} before", flush=True)
            rows.append(done[key])
            continue
        print(f"{said} ...", flush=True)
        outcome = run(arguments, folder / key)
        if outcome.result and sweep.metric[0] not in (measured := outcome.result["metrics"]):
            raise ValueError(
                f"{sweep.path}: metric.name={sweep.metric[0]} is none of {', '.join(measured)}; correct it before the "
                f"other cells are run (what this one measured is in {folder / key / FILE})"
            )
        row = done[key] = {"overrides": shlex.join(extra)} | _row(key, cell, outcome, sweep.metric[0])
        rows.append(row)
        print(f"  {row['failure'] or _line(row)}", flush=True)
        _write(table, columns, done.values())
        plot(sweep, rows, folder / "cells.png")
    return rows


def _arguments(sweep: Sweep, cell: Cell, extra: list[str]) -> list[str]:
    """Overrides of a cell's run, which logs to a file: W&B's settings, such as logger.wandb.project, are left out."""
    own = [each for each in overrides(sweep, cell) if not each.lstrip("+~").startswith("logger.")]
    return [*own, "logger=csv", *extra]


def _row(key: str, cell: Cell, outcome: Outcome, metric: str) -> dict[str, str]:
    """Of a cell: the sweep's own metric, and beside it the score by which the recipe is judged."""
    row = {"cell": key, **{name: str(value) for name, value in cell.items()}}
    if (result := outcome.result) is None:
        return row | {"status": FAILED, "failure": outcome.failure or ""}
    figures = {"value": result["metrics"][metric], "score": result["score"]["value"]}
    figures |= {name: result[name] for name in FIGURES}
    written = {name: f"{value:.6g}" for name, value in figures.items()}
    return row | {"status": "done", "metric": metric, "failure": ""} | written


def _line(row: Mapping[str, str]) -> str:
    ratio, step = float(row["ratio"]), float(row["step_ms"])
    return f"{row['metric']} {row['value']}, {ratio:.1f} x fewer bytes, {step:.1f} ms a step"


def _read(table: Path, columns: list[str]) -> dict[str, dict[str, str]]:
    if not table.exists():
        return {}
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != columns:
            raise ValueError(
                f"{table} is of another sweep, or of an earlier version: move it away, or give --out another folder"
            )
        return {row["cell"]: row for row in reader}


def _write(table: Path, columns: list[str], rows: Iterable[Mapping[str, str]]) -> None:
    with write_whole(table) as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def plot(sweep: Sweep, rows: list[dict[str, str]], path: Path) -> None:
    """Draw the sweep's metric against the bytes that a rank sent, a point for each cell that is done.

    Args:
        sweep: what was run.
        rows: of the table.
        path: file to write, a PNG.
    """
    from recipes.tables.drawing import amounts, canvas, legend, save, styles

    shown = [row for row in rows if row["status"] == "done"]
    if not shown:
        return
    varied = [key for key in sweep.axes if len({row[key] for row in rows}) > 1 and key != "seed"]
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in shown:
        label = ", ".join(row[key] for key in varied) or "all"
        groups.setdefault(label, []).append((float(row["total_bytes_sent"]), float(row["value"])))
    metric, goal = shown[0]["metric"], sweep.metric[1]
    figure, (axes,) = canvas(f"{sweep.path.stem}: {metric} against bytes", (8.4, 4.8))
    for label, style in styles(groups).items():
        axes.plot(*zip(*groups[label], strict=True), ls="", label=label, **style)
    if all(float(row["total_bytes_sent"]) > 0 for row in shown):
        axes.set_xscale("log")
    axes.set(xlabel="sent by a rank in the run", ylabel=f"{metric} ({goal})")
    amounts(axes.xaxis)
    legend(figure, axes, title=", ".join(varied), fontsize=8)
    save(figure, path)


def arguments_of(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take the command line apart; what has a ``=`` and no hyphens is an override."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.tables.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a sweep file, such as recipes/resnet/sweeps/topk_density.yaml")
    parser.add_argument("overrides", nargs="*", help="Hydra's overrides for every cell")
    parser.add_argument("--out", type=Path, help="folder of the table, the plot and the cells")
    parser.add_argument("--count", type=int, help="how many cells at most; of method: random 20")
    parser.add_argument("--seed", type=int, help="from which they are drawn")
    parser.add_argument("--again", action="store_true", help="try failed cells again")
    parsed = parser.parse_intermixed_args(words)
    return parsed, parsed.overrides


def main(words: list[str] | None = None) -> int:
    """Run a sweep's cells; returns the exit code: 0, or 1 where a cell failed or nothing could run."""
    parsed, extra = arguments_of(sys.argv[1:] if words is None else words)
    try:
        sweep = read_sweep(parsed.file, count=parsed.count, seed=parsed.seed)
        folder = (
            parsed.out or Path("outputs") / "sweeps" / f"{parsed.file.absolute().parents[1].name}_{parsed.file.stem}"
        )
        rows = run_cells(sweep, extra, folder, again=parsed.again)
    except (ValueError, OSError) as error:
        print(f"recipes.tables.sweep: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    failed = sum(row["status"] == FAILED for row in rows)
    written = [str(path) for path in (folder / "cells.csv", folder / "cells.png") if path.exists()]
    print(f"{len(rows) - failed} cells done, {failed} failed: {', '.join(written)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
