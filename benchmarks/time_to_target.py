"""Time to the same quality, for every method on every link: batches to a target times what a batch takes.

    python -m benchmarks.time_to_target --part steps --root data --minutes 170
    sudo python -m benchmarks.time_to_target --part times --root data --minutes 90
    sudo python -m benchmarks.time_to_target --part whole --root data
    python -m benchmarks.time_to_target --part table --csv map.csv --plot map.png

Task a: a character LSTM (0.43 M parameters, AdamW, 16 excerpts of 64 characters a rank and batch) reads the English
captions of Multi30k. Task b: a Transformer (16 M parameters, Adam, 256 pieces) translates them. Task c: an MLP (1.8 M
parameters, SGD, 16 pictures) learns CIFAR-10. All train on 4 ranks. Every run has a constant learning rate; a moving
average of the weights is evaluated every 25 batches. A method's rate is the one of three that reaches the final target
first with seed 0, on one half of the held-out data; where it is at the edge of the grid, the grid grows by a factor of
2. Everything else is told of the other half, with three seeds. (Task b has one rate and two seeds.) Targets come from
the dense runs: their loss at 80 % of the budget of 1,000 batches, and 1 % above their loss at its end. A run
ends after 1.5 times the budget; a miss counts as that, is shown, and never wins. A rate that is slower than another
one, with seed 0, is not run to its end; a method that misses the final target with seed 0 has no other seeds.

``steps`` trains over this machine's loopback interface, and times nothing. ``times`` measures every phase of every
method over links of a set speed, as ``benchmarks.network`` does (Linux, root, iproute2), and refuses a machine that is
busy. ``table`` composes both: the sum over phases of batches times the time of a batch. A phase is, for example,
PowerSGD's dense start. ``whole`` trains a few methods over a link from beginning to end, which shows whether the
composed times hold.

Each training run, and each link, is a JSON file in docs/results/time_to_target. It is found by its settings and holds
until the code that it depends on changes. What is there is not repeated, so every part may be interrupted. Training
runs of earlier code are kept if today's repeats the beginning of one of each method: losses within 0.1 %, as compiled
kernels round differently on another machine. Step times of earlier code are kept if six rows, measured again, differ by
15 % or less, as they are or over computing alone.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks._arguments import above_zero, file_to_write, plain_errors
from benchmarks._target import advised
from benchmarks._target.compose import Cell as Map
from benchmarks._target.compose import compose
from benchmarks._target.launch import run_ranks
from benchmarks._target.show import TARGETS, draw, show, show_steps, show_whole, write_csv
from benchmarks._target.steps import Cell, Curve, Steps
from benchmarks._target.store import FOLDER, Store
from benchmarks._target.tasks import TASKS
from benchmarks._target.times import GUESS_S, Times
from benchmarks._target.training import Data
from benchmarks._target.whole import Whole

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


def check(whole: Whole, root: Path) -> None:
    """Train over a link what is missing, however long it takes."""
    for line in whole.missing():
        found = whole.measure(line, root)
        print(f"{line.name}: {found['curve'][-1][0]:.0f} batches, {found['seconds'][-1]:.0f} s", flush=True)
    whole.measure_beside(root)


def table(steps: Steps, times: Times, whole: Whole) -> list[list[Map]]:
    """Print what is known of a task so far; return the cells of each target."""
    show_steps(steps)
    maps = [compose(steps, times, place) for place in range(len(TARGETS))]
    for place, cells in enumerate(maps):
        show(cells, place)
    if compared := whole.compared():
        show_whole(compared)
    advised.show(times)
    return maps


def parse() -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", choices=("steps", "times", "whole", "table"), required=True)
    add("--task", type=lambda text: text.split(","), default=["a"], help=f"some of {','.join(TASKS)}, by commas (a)")
    add("--root", type=Path, help="folder that holds multi30k, or cifar-10-batches-bin; for all but table")
    add("--minutes", type=above_zero, help="start nothing that will not end within so many")
    add("--folder", type=Path, default=FOLDER, help="of the cells (docs/results/time_to_target)")
    add("--links", type=lambda text: text.split(","), default=[], help="rates of links, by commas (all); for times")
    add("--plot", type=file_to_write, help="draw the map of the final target, a PNG; for table")
    add("--csv", type=file_to_write, help="write every method on every link; for table")
    arguments = parser.parse_args()
    if arguments.part != "table" and arguments.root is None:
        parser.error(f"--root: give the folder that holds the data; --part {arguments.part} reads it")
    if arguments.part == "table" and (arguments.minutes or arguments.root):
        parser.error("--root and --minutes change nothing with --part table; leave them out")
    if arguments.part == "whole" and arguments.minutes:
        parser.error("--minutes changes nothing with --part whole; leave it out")
    if unknown := set(arguments.task) - set(TASKS):
        parser.error(f"--task {','.join(sorted(unknown))}: choose from {', '.join(TASKS)}")
    links = dict.fromkeys(link for name in arguments.task for link in TASKS[name].links)
    if (arguments.part != "times" and arguments.links) or set(arguments.links) - set(links):
        parser.error(f"--links {','.join(arguments.links)}: of --part times, some of {','.join(links)}")
    if arguments.part != "table" and (arguments.plot or arguments.csv):
        parser.error(f"--plot and --csv are for --part table, not for {arguments.part}")
    return arguments


@plain_errors()
def main() -> None:
    """Do one part for each task."""
    arguments = parse()
    store, clock, maps, failed = Store(arguments.folder), Clock(arguments.minutes), {}, 0
    for task in (TASKS[name] for name in arguments.task):
        steps, times = Steps(task, store), Times(task, store)
        whole = Whole(steps, times, store)
        if arguments.part == "steps":
            failed += train(steps, arguments.root, clock)
        elif arguments.part == "times":
            measure(times, arguments.root, clock, arguments.links)
        elif arguments.part == "whole":
            check(whole, arguments.root)
        else:
            maps[task.title] = table(steps, times, whole)
    if failed:
        raise RuntimeError(f"{failed} training runs failed; the others are kept")
    if arguments.csv:
        write_csv(maps, arguments.csv)
    if arguments.plot:
        draw(maps, f"Time to the same loss, 4 ranks ({TARGETS[-1]})", arguments.plot)


if __name__ == "__main__":
    main()
