"""What each part of benchmarks.time_to_target does, as far as time allows."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks._target import advised, training
from benchmarks._target.compose import Cell as Map
from benchmarks._target.compose import compose
from benchmarks._target.methods import Run
from benchmarks._target.show import TARGETS, show, show_steps
from benchmarks._target.steps import Cell, Curve, Steps
from benchmarks._target.tasks import Task
from benchmarks._target.times import GUESS_S, Times
from benchmarks._target.training import Data
from benchmarks.harness.launch import run_beside

GUESS_BATCH_S = 0.3
"""Seconds of a batch of all ranks, as long as none was timed."""
DENSE_START = 10
"""The share of the budget in which some methods begin dense: a tenth. What is repeated goes on for two evaluations."""
ROUNDING = 1e-3
"""Share by which losses of the repeated beginning may differ: they differ by 0.07 % between two machines."""


class Clock:
    """Minutes that are left.

    Args:
        minutes: to spend; None: as many as it takes.
    """

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def fits(self, seconds: float) -> bool:
        """Return whether something so long ends in time."""
        return self._end is None or time.monotonic() + seconds <= self._end


def train(steps: Steps, root: Path, clock: Clock) -> int:
    """Do what is missing of the training runs, as far as time allows; return how many failed.

    Args:
        steps: of a task.
        root: folder with its data.
        clock: minutes that are left.
    """
    torch.set_num_threads(1)  # before anything computes: a fork has no helpers of its parent's
    data, failed, pace = steps.task.data(root), set[Cell](), GUESS_BATCH_S
    repeated: dict[tuple[str, str], bool] = {}
    while (cell := _next(steps, failed)) is not None and clock.fits(pace * steps.task.most):
        try:
            if kept := _kept(steps, cell, data, repeated):
                steps.put(cell, kept)
                continue
            until = list(cell.until) if cell.until else None
            given = cell.rate, cell.seed, steps.task.most, until, steps.patience(cell)
            found = run_ranks(steps.task, data, steps.runs[cell.run], *given)
        except Exception as error:
            failed.add(cell)
            print(f"{cell.name}: failed: {error}", file=sys.stderr, flush=True)
            continue
        steps.put(cell, found)
        curve = found["curve"]
        last = f"{curve[-1][0]:.0f} batches, loss {curve[-1][2]:.4f}" if curve else "not finite from the start"
        print(f"{cell.name}: {last}, {found['seconds']:.0f} s", flush=True)
        pace = found["seconds"] / curve[-1][0] if curve else pace
    return len(failed)


def run_ranks(task: Task, data: Data, run: Run, *given: Any) -> dict[str, Any]:
    """Return what ``training.train`` found, and ``seconds``.

    Args:
        task: sizes.
        data: of the task.
        run: of ``methods``.
        *given: rate, seed, batches, until and patience of ``train``.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the others are killed.
    """
    start = time.perf_counter()
    training.builder(run)  # here, or every rank would import it by itself
    found: dict[str, Any] = run_beside(task.ranks, _on_rank, task, data, run, given, start="fork")[0]
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def _on_rank(task: Task, data: Data, run: Run, given: tuple[Any, ...]) -> dict[str, Any]:
    torch.set_flush_denormal(True)  # at rates that are too high, batches of an LSTM would take ten times as long
    given = (*given, task.every, task.decay)
    return training.train(data, run, *given)


def _kept(steps: Steps, cell: Cell, data: Data, repeated: dict[tuple[str, str], bool]) -> dict[str, Any] | None:
    """Return what a run of earlier code found, if the code of today finds the same.

    Args:
        steps: of a task.
        cell: the run.
        data: of the task.
        repeated: whether a method's run of some code was the same again; found out once for each.
    """
    digest, found = steps.of_any_code(cell)
    if found is None:
        return None
    if (cell.run, digest) not in repeated:
        batches = steps.task.budget // DENSE_START + 2 * steps.task.every
        again = run_ranks(steps.task, data, steps.runs[cell.run], cell.rate, cell.seed, batches, None, batches)["curve"]
        same = repeated[cell.run, digest] = _begins_alike(again, found["curve"])
        print(f"{cell.name}: {'the same' if same else 'not the same'} by the code of today", flush=True)
    return found if repeated[cell.run, digest] else None


def _begins_alike(again: Curve, earlier: Curve) -> bool:
    """Return whether an earlier curve begins as what was repeated of it."""
    begun = earlier[: len(again)]
    pairs = zip(chain(*again), chain(*begun), strict=False)
    return 0 < len(again) == len(begun) and all(math.isclose(*pair, rel_tol=ROUNDING) for pair in pairs)


def _next(steps: Steps, failed: set[Cell]) -> Cell | None:
    """Return the most important run that is missing and did not fail today."""
    missing: Iterator[Cell] = steps.missing()
    return next((cell for cell in missing if cell not in failed), None)


def measure(times: Times, root: Path, clock: Clock, links: list[str]) -> None:
    """Measure the links that are missing, or those that were named, as far as time allows."""
    pace = GUESS_S
    for place in times.missing():
        if links and place.rate not in links:
            continue
        if not clock.fits(pace):
            break
        if times.kept(place, root):
            print(f"{place.name}: as before", flush=True)
            continue
        found = times.measure(place, root)
        pace = found["seconds"]
        print(f"{place.name}: {len(found['ms'])} rows, auto chose {found['chosen']}, {pace:.0f} s", flush=True)


def table(steps: Steps, times: Times) -> list[list[Map]]:
    """Print what is known of a task so far; return the cells of each target."""
    show_steps(steps)
    maps = [compose(steps, times, place) for place in range(len(TARGETS))]
    for place, cells in enumerate(maps):
        show(cells, place)
    advised.show(times)
    return maps
