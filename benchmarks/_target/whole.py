"""Whole trainings over a link, which show whether what was composed of batches and milliseconds holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._target.compose import seconds
from benchmarks._target.methods import Method, methods
from benchmarks._target.steps import CHOOSING, REPORTED, Cell, Steps, reached
from benchmarks._target.store import Store, digest
from benchmarks._target.times import Times, wait_until_idle
from benchmarks.harness.lab import Lab
from benchmarks.harness.launch import run_ranks

Ms = dict[str, float]
"""Milliseconds of a batch, by row."""


@dataclass(frozen=True)
class Check:
    """A link and the lines of the map that are trained over it.

    Args:
        link: its rate; no round trip is added.
        lines: by their names in ``methods``.
        batches: to train for; None: to the final target.
    """

    link: str
    lines: tuple[str, ...]
    batches: int | None = None


CHECKS = {
    "a": Check("20mbit", ("DDP 25 MB", "PowerSGD hook 4", "local SGD 8, rotated 4")),
    "b": Check("100mbit", ("DDP 25 MB", "rotated 4"), 100),
}


@dataclass(frozen=True)
class Compared:
    """A training over a link beside what the map says of it.

    Args:
        name: of the line.
        batches: that were trained, to the target if there is one.
        seconds: that they took.
        composed: seconds that the map says.
        beside: seconds that step times say which were measured after the trainings; None: they were not.
    """

    name: str
    batches: int
    seconds: float
    composed: float
    beside: float | None


class Whole:
    """The whole trainings of a task.

    Args:
        steps: its training runs, which say each method's rate and the targets.
        times: its step times.
        store: where cells are.
    """

    def __init__(self, steps: Steps, times: Times, store: Store) -> None:
        self._steps, self._times, self._store = steps, times, store
        self._check = CHECKS.get(steps.task.name, Check("", ()))
        self._lines = [each for each in methods(steps.task) if each.name in self._check.lines]
        few = replace(steps.task, lines=self._check.lines, links=(self._check.link,), round_trips=(0.0,))
        self._beside = Times(few, store, "whole")  # a machine that others share is slower on some days
        (self._place,) = self._beside.places

    def missing(self) -> Iterator[Method]:
        """Yield lines that were not trained.

        Raises:
            ValueError: training runs of a line are missing, which say its rate.
        """
        for line in self._lines:
            if self._steps.untried(line.run) is not None:
                raise ValueError(f"training runs of {line.name} are missing; --part steps does them first")
            if self._store.get(*self._key(line)) is None:
                yield line

    def measure(self, line: Method, root: Path) -> dict[str, Any]:
        """Train a line over the link, and keep what it found.

        Raises:
            RuntimeError: the machine is busy, the lab cannot be built, or a rank failed.
        """
        lab = Lab(self._steps.task.ranks, self._place.rate, self._place.delay_ms)
        wait_until_idle()
        cell = self._cell(line)
        told: dict[str, Any] = {"task": self._steps.task.name, "root": str(root.absolute())}
        told |= {"run": line.run, "rate": cell.rate, "seed": cell.seed, "until": self._until, "batches": self._batches}
        with lab:
            found = run_ranks(lab, told, "benchmarks._target.whole_rank")[0]
        self._store.put(*self._key(line), found)
        return found

    def measure_beside(self, root: Path) -> None:
        """Measure the lines' step times if they are missing: right after the trainings, the machine is as fast.

        Raises:
            RuntimeError: see ``measure``.
        """
        if self._lines and self._beside.get(self._place) is None:
            self._beside.measure(self._place, root)

    def compared(self) -> list[Compared]:
        """Return the trainings that are done, beside what the map says."""
        measured, beside = self._times.get(self._place), self._beside.get(self._place)
        return [
            each
            for line in self._lines
            if measured is not None and self._steps.untried(line.run) is None
            if (found := self._store.get(*self._key(line))) is not None
            if (each := self._compare(line, found, measured["ms"], beside and beside["ms"])) is not None
        ]

    def _compare(self, line: Method, found: dict[str, Any], ms: Ms, beside: Ms | None) -> Compared | None:
        """Return how long a training took, and how long it was said to take; None if it missed its target."""
        if self._check.batches:
            batches = composed = self._check.batches
        else:
            target, run = self._steps.targets()[REPORTED][1], self._steps.get(self._cell(line))
            batches = reached(found["curve"], REPORTED, target) or 0
            composed = (run and reached(run["curve"], REPORTED, target)) or 0
        spent = {int(row[0]): took for row, took in zip(found["curve"], found["seconds"], strict=True)}
        if not batches or not composed:
            return None
        again = seconds(line.phases, composed, beside) if beside else None
        return Compared(line.name, batches, spent[batches], seconds(line.phases, composed, ms), again)

    def _cell(self, line: Method) -> Cell:
        """Return the training run whose batches the map counts, of the first seed."""
        return self._steps.cell(line.run, self._steps.best_rate(line.run), self._steps.task.seeds[0])

    @property
    def _until(self) -> tuple[float, float] | None:
        targets = self._steps.targets()
        return None if self._check.batches else (targets[CHOOSING][1], targets[REPORTED][1])

    @property
    def _batches(self) -> int:
        return self._check.batches or self._steps.task.most

    def _key(self, line: Method) -> tuple[str, str, Any, str]:
        task, cell = self._steps.task, self._cell(line)
        place = {"rate": self._place.rate, "delay_ms": self._place.delay_ms}
        settings = self._steps.key(cell) | {"until": self._until, "batches": self._batches, "place": place}
        parts = (
            "_target.whole_rank",
            f"_target.{self._steps.runs[line.run]['by']}",
            "harness.lab",
            "harness.launch",
            "harness.rank",
        )
        code = digest(task.module, *(f"benchmarks.{each}" for each in parts))
        return f"{task.name}/whole", f"{self._place.rate}, {line.name}", settings, code
