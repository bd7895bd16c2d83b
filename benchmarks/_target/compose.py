"""Time to target: batches to the target, phase by phase, times what a batch of the phase takes on a link."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._target.methods import AUTO, DDP, FREE, NEAR_LOSSLESS, Method, auto_method, methods
from benchmarks._target.steps import NO_DENSE, Steps
from benchmarks._target.tasks import Task
from benchmarks._target.times import Place, Times, kappa


@dataclass(frozen=True)
class Entry:
    """One method on one link.

    Args:
        method: which.
        seconds: to the target, by seed; of a miss, to the end of the run.
        missed: seeds that did not reach it.
        over: mean seconds over those of dense runs whose communication takes no time.
    """

    method: Method
    seconds: tuple[float, ...]
    missed: int
    over: float

    @property
    def mean(self) -> float:
        """Seconds, the mean of the seeds."""
        return statistics.mean(self.seconds)


@dataclass(frozen=True)
class Cell:
    """All methods on one link.

    Args:
        place: the link.
        kappa: float32's communication over computing.
        entries: of methods whose runs are complete, the fastest first.
        missing: names of the others.
    """

    place: Place
    kappa: float
    entries: tuple[Entry, ...]
    missing: tuple[str, ...]

    def best(self, side: str, names: Collection[str] = ()) -> Entry | None:
        """Return the fastest method of a side that reached the target with every seed, None if there is none.

        Args:
            side: "theirs" or "ours".
            names: of those that count; empty: all.
        """
        met = (each for each in self.entries if each.method.side == side and not each.missed)
        return next((each for each in met if not names or each.method.name in names), None)

    def factor(self, rivals: Collection[str] = ()) -> float | None:
        """Return how many times faster than the best of theirs the best of ours is; None if either is missing.

        Args:
            rivals: names of those of theirs that count; empty: all.
        """
        ours, theirs = self.best("ours"), self.best("theirs", rivals)
        return theirs.mean / ours.mean if ours and theirs else None

    def is_clear(self) -> bool:
        """Return whether the slowest seed of the faster side beats the fastest seed of the other."""
        ours, theirs = self.best("ours"), self.best("theirs")
        if not ours or not theirs:
            return False
        faster, slower = sorted((ours, theirs), key=lambda each: each.mean)
        return max(faster.seconds) < min(slower.seconds)

    def of_auto(self) -> dict[str, float]:
        """Return ``auto``'s seconds over those of the best near-lossless method by hand, and over DDP's.

        If it chose that method, the first is 1 whatever noise says.
        """
        found = {each.method.name: each for each in self.entries}
        hand = [found[name] for name in NEAR_LOSSLESS if name in found]
        if AUTO not in found or not hand:
            return {}
        auto, best = found[AUTO], min(hand, key=lambda each: each.mean)
        same = auto.method.run == best.method.run
        ddp = [each.mean for each in hand if each.method.run == DDP]
        return {"hand": 1.0 if same else auto.mean / best.mean} | ({"ddp": auto.mean / min(ddp)} if ddp else {})


def seconds(phases: Sequence[tuple[int, str]], batches: int, ms: Mapping[str, float]) -> float:
    """Return the sum over phases of batches times the time of one.

    Args:
        phases: of a ``Method``.
        batches: of the whole run.
        ms: milliseconds of a batch, by row.
    """
    ends = [first for first, _ in phases[1:]] + [batches]
    lasting = [max(0, min(end, batches) - first) for (first, _), end in zip(phases, ends, strict=True)]
    return sum(count * ms[row] for count, (_, row) in zip(lasting, phases, strict=True)) / 1e3


def entry(task: Task, method: Method, found: Sequence[int | None], ms: Mapping[str, float], alone: float) -> Entry:
    """Return a method on a link.

    Args:
        task: says after how many batches a run has missed its target.
        method: which.
        found: batches to the target by seed, None for a miss.
        ms: milliseconds of a batch, by row.
        alone: seconds of the dense runs without communication.
    """
    took = tuple(seconds(method.phases, task.most if each is None else each, ms) for each in found)
    return Entry(method, took, sum(each is None for each in found), statistics.mean(took) / alone)


def compose(steps: Steps, times: Times, place: int) -> list[Cell]:
    """Return a cell of every link that was measured.

    Args:
        steps: the training runs.
        times: the step times.
        place: of the target, 0 for the early one, 1 for the final one.

    Raises:
        ValueError: the dense runs are missing.
    """
    batches = {run: steps.to_target(run, place) for run in steps.runs}
    dense, cells = batches[DDP], []
    if dense is None:
        raise ValueError(NO_DENSE)
    for link in times.places:
        measured = times.get(link)
        if measured is not None:
            cells.append(_cell(steps.task, link, measured, batches, dense))
    return cells


def _cell(
    task: Task,
    place: Place,
    measured: dict[str, Any],
    batches: dict[str, list[int | None] | None],
    dense: list[int | None],
) -> Cell:
    ms, entries, missing = measured["ms"], [], []
    alone = statistics.mean(ms[FREE] * (task.budget if each is None else each) for each in dense) / 1e3
    lines = methods(task)
    if measured["chosen"]:
        lines.append(auto_method(measured["chosen"]))
    for method in lines:
        found = batches[method.run]
        if found is None:
            missing.append(method.name)
        else:
            entries.append(entry(task, method, found, ms, alone))
    entries.sort(key=lambda each: each.mean)
    return Cell(place, kappa(place, measured, task.ranks), tuple(entries), tuple(missing))
