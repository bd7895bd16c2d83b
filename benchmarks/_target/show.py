"""The map as tables and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks._target.compose import Cell, Entry
from benchmarks._target.methods import AUTO, DDP, DENSE, HOOKS
from benchmarks._target.steps import REPORTED, Steps
from benchmarks.harness import tables
from benchmarks.harness.lab import bits_per_second
from benchmarks.harness.results import write_table
from recipes.tables.drawing import MARKERS, canvas, caption, legend, save

TARGETS = ("at 80 % of the budget", "final loss + 1 %")
MISS = "miss"
WIDTH = 150
COLUMNS = 2
"""Panels side by side."""
LINES = {
    DENSE: "#000000",
    "fp16 hook": "#7f7f7f",
    "PowerSGD hook 4": "#8c564b",
    "accumulation 2, fp16": "#bcbd22",
    "post-local SGD 16": "#e377c2",
    "sufficient factors": "#ff7f0e",
    "rotated 4": "#1f77b4",
    "qsgd 4": "#000080",
    "onebit": "#2ca02c",
    "local SGD 8, rotated 4": "#d62728",
    "DiLoCo 30, rotated 4": "#17becf",
    AUTO: "#9467bd",
}
"""Methods that the picture has a line of; the tables have all."""


def show_steps(steps: Steps) -> None:
    """Print every method's batches to both targets; of those that are not complete, by what is there so far."""
    targets = steps.targets()[REPORTED]
    said = [f"{loss:.4f} ({which})" for loss, which in zip(targets, TARGETS, strict=True)]
    title = f"{steps.task.title}: batches to a held-out loss of {' and '.join(said)}, by seed"
    dense, rows = steps.to_target(DDP, 1), list[tuple[str, ...]]()
    for run in steps.runs:
        both = [steps.so_far(run, place) for place in range(2)]
        columns = [" ".join(MISS if each is None else str(each) for each in found) for found in both]
        rate = " ".join(f"{each:g}" for each in steps.tried(run)[:1])
        if dense is None or steps.to_target(run, 1) is None:
            rows.append((run, rate, *columns, "incomplete"))
            continue
        missed = sum(each is None for each in both[1])
        pairs = list(zip(both[1], dense, strict=False))
        over = [(each or steps.task.most) / (own or steps.task.budget) for each, own in pairs]
        notes = [f"{missed} of {len(pairs)} missed"] * bool(missed)
        notes += ["seeds are missing"] * (steps.next_of(run) is not None)
        rows.append((run, rate, *columns, f"{sum(over) / len(over):.2f}", ", ".join(notes)))
    tables.show(("run", "rate", *TARGETS, "/ dense", "notes"), rows, title, width=WIDTH, firm=("run",))


def show(cells: list[Cell], place: int) -> None:
    """Print the winner on every link, the factor over the best of theirs, and what ``auto`` cost."""
    head = ("rate", "round trip", "kappa", "best of ours", "best of theirs", "factor", "best hook", "factor")
    rows = map(_line_of_link, cells)
    title = f"time to target ({TARGETS[place]}), over computing alone"
    tables.show((*head, "auto / by hand", "/ DDP"), rows, title, width=WIDTH)
    if missing := list(dict.fromkeys(name for cell in cells for name in cell.missing)):
        print(f"not in it, as their runs are missing: {'; '.join(missing)}")
    missed = {each.method.name: each.missed for cell in cells for each in cell.entries if each.missed}
    if missed:
        said = "; ".join(f"{name} ({count} seeds)" for name, count in missed.items())
        print(f"missed the target, so counted to the end of the run, and never the best: {said}")


def _line_of_link(cell: Cell) -> tuple[str, ...]:
    factor, auto = cell.factor(), cell.of_auto()
    return (
        cell.place.rate,
        f"{cell.place.delay_ms:g} ms",
        f"{cell.kappa:.2f}",
        *(_best(cell.best(side)) for side in ("ours", "theirs")),
        f"{factor:.2f} x{'' if cell.is_clear() else ', seeds overlap'}" if factor else "",
        _best(cell.best("theirs", HOOKS)),
        f"{over_hooks:.2f} x" if (over_hooks := cell.factor(HOOKS)) else "",
        *(f"{auto[name]:.2f}" if name in auto else "" for name in ("hand", "ddp")),
    )


def _best(found: Entry | None) -> str:
    return f"{found.method.name}, {found.over:.2f} x" if found else "none reached it"


Maps = dict[str, list[list[Cell]]]
"""By a task's title: cells of each target."""


def write_csv(maps: Maps, path: Path) -> None:
    """Write a row for every task, target, link and method."""
    link = ("rate", "round trip ms", "kappa")
    head = ("task", "target", *link, "method", "side", "seconds by seed", "missed", "over alone")
    rows = (
        (title, which, *_link(cell), *_line(each))
        for title, by_target in maps.items()
        for which, cells in zip(TARGETS, by_target, strict=True)
        for cell in cells
        for each in cell.entries
    )
    write_table(path, head, rows)


def _link(cell: Cell) -> tuple[str, str, str]:
    return cell.place.rate, f"{cell.place.delay_ms:g}", f"{cell.kappa:.4g}"


def _line(found: Entry) -> tuple[str, str, str, int, str]:
    by_seed = " ".join(f"{took:.1f}" for took in found.seconds)
    return found.method.name, found.method.side, by_seed, found.missed, f"{found.over:.3f}"


def draw(maps: Maps, title: str, path: Path) -> None:
    """Draw time to the final target over computing alone, against kappa; a panel for each task and round trip; a PNG.

    Hollow points missed the target. Below the axis: the best of ours, and how many times faster it is.

    Args:
        maps: of all tasks.
        title: of all panels.
        path: file to write.

    Raises:
        ValueError: no link was measured.
    """
    panels: dict[tuple[str, float], list[Cell]] = {}
    for task, by_target in maps.items():
        for cell in by_target[-1]:
            panels.setdefault((task, cell.place.delay_ms), []).append(cell)
    if not panels:
        raise ValueError("there is nothing to draw: no link was measured; --part times does it")
    columns, lines = min(COLUMNS, len(panels)), math.ceil(len(panels) / COLUMNS)
    figure, axes = canvas(title, (6.8 * columns + 2.0, 4.8 * lines), columns, nrows=lines, sharey=True)
    for empty in axes[len(panels) :]:
        empty.remove()
    for axis, ((task, delay), cells) in zip(axes, panels.items(), strict=False):
        caption(axis, f"{task}{f', {delay:g} ms of round trip' if delay else ''}")
        _panel(axis, sorted(cells, key=lambda each: each.kappa))
    for first in axes[::columns]:
        first.set_ylabel("time to target / computing alone")
    legend(figure, *axes[: len(panels)])
    save(figure, path)


def _panel(axis: Any, cells: list[Cell]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    for marker, (name, color) in zip(MARKERS, LINES.items(), strict=False):
        found = [(cell.kappa, each) for cell in cells for each in cell.entries if each.method.name == name]
        if found:
            points = [kappa for kappa, _ in found], [each.over for _, each in found]
            style = "-" if found[0][1].method.side == "ours" else "--"
            axis.plot(*points, style, color=color, marker=marker, ms=5, lw=1.4, label=name)
            faces = ["white" if each.missed else color for _, each in found]
            axis.scatter(*points, s=24, marker=marker, edgecolors=color, facecolors=faces, zorder=3)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("kappa: float32 communication / computing")
    axis.set_xticks([cell.kappa for cell in cells], [_tick(cell) for cell in cells], fontsize=6.5)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _tick(cell: Cell) -> str:
    rate, factor, ours = bits_per_second(cell.place.rate), cell.factor(), cell.best("ours")
    speed = f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"
    won = "\n{}\n{:.2f} x".format(ours.method.name.replace(", ", ",\n"), factor) if ours and factor else ""
    return f"{cell.kappa:.2g}\n{speed}{won}"
