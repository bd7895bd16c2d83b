"""The demo's table, and what follows from it."""

from __future__ import annotations

from typing import NamedTuple

PAYS = 1.1
"""By what factor a step must be shorter to be called so."""
POINTS = 1.0
"""What short trainings from other seeds differ by, in the printed unit of a score."""


class Row(NamedTuple):
    """A training and its steps; figures as precise as they are printed, so that a reader can check what follows."""

    task: str
    method: str
    label: str
    """What the score is called."""
    value: float
    """The score as it is printed: percent, or points of BLEU."""
    unit: str
    higher: bool
    """Whether more is better."""
    bytes_per_step: float
    """That a rank sends."""
    ratio: float
    ms: dict[str, int]
    """A step's milliseconds, by rate."""


def table(rows: list[Row], *, paced: bool) -> str:
    """All rows, as Markdown that is easy to read as it stands.

    Args:
        rows: of one task after the other.
        paced: the links were played.
    """
    steps = [f"step at {rate}{', paced' if paced else ''}" for rate in rows[0].ms]
    lines = [["task", "compressor", "quality", "bytes per step", "ratio", *steps]]
    lines += [
        [
            row.task,
            row.method,
            f"{row.label} {row.value:.1f}{row.unit}",
            f"{row.bytes_per_step:,.0f}",
            f"{row.ratio:.1f} x",
            *(f"{ms:,.0f} ms" for ms in row.ms.values()),
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = 3  # columns of words; the others are figures
    shown = [
        [cell.ljust(width) if place < left else cell.rjust(width) for place, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    rule = ["-" * width if place < left else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (shown[0], rule, *shown[1:]))


def conclusion(rows: list[Row]) -> str:
    """What to conclude, in a line that follows from the rows alone."""
    dense = {row.task: row for row in rows if row.method == "dense"}
    others = [row for row in rows if row.method != "dense"]
    said = []
    for rate in reversed(rows[0].ms):
        factors = {_name(row): dense[row.task].ms[rate] / row.ms[rate] for row in others}
        said.append(_speed(rate, factors))
    lost = [
        f"{_name(row)} ({row.value:.1f} against {dense[row.task].value:.1f})"
        for row in others
        if (dense[row.task].value - row.value) * (1 if row.higher else -1) > POINTS
    ]
    point = "Quality is within a point of dense"
    said.append(f"{point}, but for {'; '.join(lost)}." if lost else f"{point} in every row.")
    return " ".join(said)


def _name(row: Row) -> str:
    return f"{row.method} on {row.task}"


def _speed(rate: str, factors: dict[str, float]) -> str:
    """Where compression pays at a rate."""
    slow = [name for name, factor in factors.items() if factor < PAYS]
    paying = [factor for factor in factors.values() if factor >= PAYS] or list(factors.values())
    low, high = f"{min(paying):.1f}", f"{max(paying):.1f}"
    span = low if low == high else f"{low} to {high}"
    if not slow:
        return f"At {rate} compression pays in every row: a step is {span} times as fast as dense."
    if len(slow) == len(factors):
        return f"At {rate} it pays in no row: a step is {span} times as fast as dense."
    where = f"in {len(paying)} of {len(factors)} rows ({span} times as fast)"
    return f"At {rate} it pays {where}; by less than a tenth, or not at all: {'; '.join(slow)}."
