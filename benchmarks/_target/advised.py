"""What ``lightning-compress advise`` says of a task's steps, to whose links and model nothing in it was fitted."""

from __future__ import annotations

from typing import Any

from benchmarks._target.methods import DENSE, FREE
from benchmarks._target.show import WIDTH
from benchmarks._target.tasks import Task
from benchmarks._target.times import Place, Times
from benchmarks.harness import tables
from benchmarks.harness.lab import bits_per_second
from lightning_compress.commands import forecast, jobs

ROWS = {
    "float32 (DDP)": DENSE,
    "bf16": "our bf16",
    "qsgd, 8 bits": "qsgd 8",
    "qsgd, 4 bits": "qsgd 4",
    "onebit": "onebit",
    "topk, 1 %": "topk 1 %",
    "8 local steps, rotated, 4 bits": "local SGD 8, rotated 4",
}
"""Rows of step times, by the names of advised methods."""
WITHIN = 0.25
"""By what a prediction may be off."""


def over_measured(task: Task, place: Place, measured: dict[str, Any]) -> dict[str, float]:
    """Return predicted over measured time of a step, by row.

    ``advise`` is told what a user knows before a run: how many parameters, the link's rate and latency, how long a
    step computes, and how many cores a rank has.

    Args:
        task: which.
        place: the link.
        measured: on it.
    """
    parameters = jobs.parameters_of(measured["parameters"], None)
    link = jobs.link_of(bits_per_second(place.rate) / 1e9, 500 * measured["ping_ms"])
    cores = min(1.0, measured["cores"] / task.ranks)
    rows = forecast.predicted(parameters, task.ranks, link, measured["ms"][FREE], task.optimizer, cores)
    said = {ROWS[row.method]: row.step_ms for row in rows if row.method in ROWS}
    return {name: ms / measured["ms"][name] for name, ms in said.items() if name in measured["ms"]}


def show(times: Times) -> None:
    """Print predicted over measured steps of every link, and how many are near enough."""
    rows, ratios = list[tuple[str, ...]](), list[float]()
    for place in times.places:
        if (measured := times.get(place)) is not None:
            found = over_measured(times.task, place, measured)
            said = (f"{found[name]:.2f}" if name in found else "" for name in ROWS.values())
            rows.append((place.rate, f"{place.delay_ms:g} ms", *said))
            ratios += found.values()
    head = ("rate", "round trip", *ROWS.values())
    tables.show(head, rows, "steps that advise predicts without a run, over measured ones", width=WIDTH)
    print(f"within {WITHIN:.0%}: {sum(abs(each - 1) <= WITHIN for each in ratios)} of {len(ratios)}")
