"""Steps to target: which training run comes next, which learning rate is a method's best, and what the target is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks._target.methods import DDP, Run, runs
from benchmarks._target.store import Store, digest
from benchmarks._target.tasks import Task

Curve = list[list[float]]
"""Rows of a batch's number and the losses on both halves of the held-out text."""
CHOOSING, REPORTED = 1, 2
"""Columns of a curve: learning rates are chosen by the first half, all else is told of the second."""
EARLY, MARGIN = 0.8, 1.01
"""The targets: dense's loss after this share of the budget, and its loss at the end times this."""
NO_DENSE = "the targets come from dense runs, which are missing; --part steps does them first"
WIDEST = 3
"""Times that a grid of rates grows by a factor of 2 at an edge."""


@dataclass(frozen=True)
class Cell:
    """A training run.

    Args:
        run: its name in ``methods``.
        rate: of learning.
        seed: of weights and data.
        until: losses of both halves that end it; None: dense runs, which set the targets.
    """

    run: str
    rate: float
    seed: int
    until: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """For people, and the beginning of the file's name."""
        return f"{self.run}, rate {self.rate:g}, seed {self.seed}"


Targets = dict[int, tuple[float, float]]
"""By column of a curve: the early and the final target."""


class Steps:
    """The training runs of a task, and what they found so far.

    Args:
        task: which.
        store: where cells are.
    """

    def __init__(self, task: Task, store: Store) -> None:
        self.task, self._store = task, store
        self.runs: dict[str, Run] = runs(task)
        self._read: dict[Cell, dict[str, Any] | None] = {}

    def key(self, cell: Cell) -> dict[str, Any]:
        """Return all settings that a run depends on."""
        task = self.task
        settings = {"name": task.name, "ranks": task.ranks, "every": task.every, "decay": task.decay}
        return {"task": settings, **asdict(cell), "run": self.runs[cell.run], "batches": self.task.most}

    def code(self, cell: Cell) -> str:
        """Return the digest of the code that a run depends on."""
        by = f"benchmarks._target.{self.runs[cell.run]['by']}"
        return digest("benchmarks._target.training", self.task.module, by)

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """Return what a run found, None if it is missing."""
        if not self._store.any_code:
            return self._store.get(f"{self.task.name}/steps", cell.name, self.key(cell), self.code(cell))
        if cell not in self._read:  # a table asks for each a thousand times, and nothing is written meanwhile
            self._read[cell] = self.of_any_code(cell)[1]
        return self._read[cell]

    def of_any_code(self, cell: Cell) -> tuple[str, dict[str, Any] | None]:
        """Return what a run of this or of earlier code found; see ``Store.of_any_code``."""
        return self._store.of_any_code(f"{self.task.name}/steps", cell.name, self.key(cell))

    def put(self, cell: Cell, found: dict[str, Any]) -> None:
        """Keep what a run found."""
        self._store.put(f"{self.task.name}/steps", cell.name, self.key(cell), self.code(cell), found)

    def missing(self) -> Iterator[Cell]:
        """Yield a run to do next of every method that is not complete: first of those that have the fewest.

        Nothing but dense runs can start before the targets are fixed.
        """
        if (dense := self.next_of(DDP)) is not None:
            yield dense
            return
        cells = [cell for cell in map(self.next_of, self.runs) if cell is not None]
        yield from sorted(cells, key=lambda cell: len(self.tried(cell.run)))  # stable: the most important of them first

    def next_of(self, run: str) -> Cell | None:
        """Return a method's next run, None if it is complete: the rates with the first seed, then the other seeds.

        A method that misses the final target with the first seed cannot win, and has no others.
        """
        cell = self.untried(run)
        if cell is not None:
            return cell
        if run != DDP and self.so_far(run, 1)[0] is None:
            return None
        seeds = [self.cell(run, self.best_rate(run), seed) for seed in self.task.seeds]
        return next((each for each in seeds if self.get(each) is None), None)

    def cell(self, run: str, rate: float, seed: int) -> Cell:
        """Return a run's cell, which ends at the final target unless it is a dense one."""
        until = None
        if run != DDP:
            targets = self.targets()
            until = targets[CHOOSING][1], targets[REPORTED][1]
        return Cell(run, rate, seed, until)

    def patience(self, cell: Cell) -> int:
        """Return the batches in which a better rate of the method met the final target: more cannot be the best."""
        if cell.until is None or cell.seed != self.task.seeds[0]:
            return self.task.most
        best = [self._score(cell.run, rate)[0] for rate in self.tried(cell.run)[:1]]
        return int(min([self.task.most, *best]))

    def untried(self, run: str) -> Cell | None:
        """Return the run of the next rate to try, None if the best one is known."""
        cells = [self.cell(run, rate, self.task.seeds[0]) for rate in self.grid(run)]
        return next((each for each in cells if self.get(each) is None), None)

    def tried(self, run: str) -> list[float]:
        """Return the rates that are done with the first seed, the best first."""
        cells = [self.cell(run, rate, self.task.seeds[0]) for rate in self.grid(run)]
        return sorted((each.rate for each in cells if self.get(each)), key=lambda rate: self._score(run, rate))

    def grid(self, run: str) -> list[float]:
        """Return the rates of a method as far as they are known to be needed, the middle first."""
        rates = sorted(self.task.rates)
        for _ in range(WIDEST):
            if any(self.get(self.cell(run, rate, self.task.seeds[0])) is None for rate in rates):
                break
            best = self._best(run, rates)
            if len(rates) == 1 or best not in (rates[0], rates[-1]):
                break
            rates = [rates[0] / 2, *rates] if best == rates[0] else [*rates, rates[-1] * 2]
        middle = sorted(self.task.rates)[len(self.task.rates) // 2]
        return sorted(rates, key=lambda rate: abs(math.log(rate / middle)))

    def best_rate(self, run: str) -> float:
        """Return the rate that reaches the final target first, by the choosing half and the first seed."""
        return self._best(run, self.grid(run))

    def _best(self, run: str, rates: Sequence[float]) -> float:
        return min(rates, key=lambda rate: self._score(run, rate))

    def _score(self, run: str, rate: float) -> tuple[float, ...]:
        """Return what is least for the best rate: batches to the targets, then the loss."""
        found = self.get(self.cell(run, rate, self.task.seeds[0]))
        assert found is not None
        if not found["finite"] or not found["curve"]:
            return (math.inf,) * 3
        if run == DDP:
            return 0, 0, at(found["curve"], CHOOSING, self.task.budget)
        last = found["curve"][-1][CHOOSING]
        early, final = (reached(found["curve"], CHOOSING, each) for each in self.targets()[CHOOSING])
        return final or math.inf, early or math.inf, last

    def targets(self) -> Targets:
        """Return the losses to reach, from the mean of the dense runs at their best rate.

        Raises:
            ValueError: dense runs are missing.
        """
        if self.untried(DDP) is not None:
            raise ValueError(NO_DENSE)
        rate = self.best_rate(DDP)
        found = [self.get(Cell(DDP, rate, seed)) for seed in self.task.seeds]
        curves = [each["curve"] for each in found if each is not None]
        if len(curves) < len(self.task.seeds):
            raise ValueError(NO_DENSE)
        budget = self.task.budget

        def target(column: int) -> tuple[float, float]:
            early = statistics.mean(at(curve, column, EARLY * budget) for curve in curves)
            final = statistics.mean(at(curve, column, budget) for curve in curves)
            return round(early, 4), round(MARGIN * final, 4)

        return {column: target(column) for column in (CHOOSING, REPORTED)}

    def to_target(self, run: str, place: int) -> list[int | None] | None:
        """Return the batches to a target at the best rate by seed so far, None for a miss; None if rates are missing.

        A method that misses with the first seed has no others.

        Args:
            run: its name.
            place: of the target, 0 for the early one, 1 for the final one.
        """
        return self.so_far(run, place) if self.untried(run) is None else None

    def so_far(self, run: str, place: int) -> list[int | None]:
        """Return ``to_target`` of those seeds that are done at the best of the rates that are done."""
        target, rates = self.targets()[REPORTED][place], self.tried(run)[:1]
        found = [self.get(self.cell(run, rate, seed)) for rate in rates for seed in self.task.seeds]
        return [reached(each["curve"], REPORTED, target) for each in found if each is not None]


def at(curve: Curve, column: int, batch: float) -> float:
    """Return the loss at the first evaluation from a batch on; infinity: the run ended before."""
    return next((row[column] for row in curve if row[0] >= batch), math.inf)


def reached(curve: Curve, column: int, target: float) -> int | None:
    """Return the batch of the first evaluation at or below the target; None: there was none."""
    return next((int(row[0]) for row in curve if row[column] <= target), None)
