"""The map as tables."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from benchmarks._target.compose import Cell, Entry
from benchmarks._target.drawn import OURS
from benchmarks._target.methods import DDP, DENSE, HOOKS
from benchmarks._target.steps import REPORTED, Steps
from benchmarks.harness import tables
from benchmarks.harness.lab import bits_per_second
from benchmarks.harness.results import write_table
from recipes.tables.drawing import speed

TARGETS = ("at 80 % of the budget", "final loss + 1 %")
MISS = "miss"
WIDTH = 150


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


FRONT = ("100mbit", "1gbit")
"""Links of the table in README.md."""


def front_table(maps: Maps) -> str:
    """Return the table of README.md: minutes to the final target, by method and by task and link; Markdown."""
    places = [
        (title, cell)
        for title, by_target in maps.items()
        for cell in by_target[-1]
        if cell.place.rate in FRONT and not cell.place.delay_ms
    ]
    head = [
        f"{title.partition(',')[0].removeprefix('character ')}: {speed(bits_per_second(cell.place.rate))}"
        for title, cell in places
    ]
    lines: dict[str, tuple[str, Collection[str]]] = {
        "DDP": ("theirs", [DENSE]),
        "PyTorch's fp16 hook": ("theirs", ["fp16 hook"]),
        "PyTorch's PowerSGD hook": ("theirs", [name for name in HOOKS if name.startswith("PowerSGD")]),
        "the best that ships": ("theirs", ()),
        '**ours, `"qsgd"`**': ("ours", ["qsgd 4"]),
        "**ours, 8 local steps**": ("ours", [OURS]),
    }
    rows = [[line, *(_minutes(cell, *which) for _, cell in places)] for line, which in lines.items()]
    rule = ["---", *(["---:"] * len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (["", *head], rule, *rows))


def _minutes(cell: Cell, side: str, names: Collection[str]) -> str:
    found = cell.best(side, names)
    if found is None:
        return "missed" if any(each.method.name in names for each in cell.entries) else "not run"
    return f"{found.mean / 60:.{0 if found.mean >= 600 else 1}f}"
