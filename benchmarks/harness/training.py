"""Trainings one after the other, each with a learning rate that falls linearly to 0, and their table."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks._local import Local
from benchmarks.harness.launch import run_beside
from benchmarks.harness.results import Results
from benchmarks.harness.tables import show
from benchmarks.harness.tasks import TASKS, Task
from lightning_compress import attach

LAST = 20
"""Steps at the end, of which the training loss is the mean."""
Run = dict[str, Any]
"""``name``, the key of its result, and ``model``, of ``TASKS``; ``seed``, ``rate``, ``steps``; and what else its
``Train`` takes of it."""
Train = Callable[[Run, Task], dict[str, float]]
"""Trains on one rank; see ``descend``."""


def run_missing(ranks: int, runs: list[Run], root: Path | None, path: Path, train: Train) -> Results:
    """Return all results, once those that were missing are there; see ``work``."""
    if missing := [run for run in runs if run["name"] not in Results(path)]:
        run_beside(ranks, work, missing, root, path, train)
    return Results(path)


def work(runs: list[Run], root: Path, results: Path, trained: Train) -> None:
    """All runs, one after the other, on one rank; rank 0 writes down each result.

    Args:
        runs: each with its ``name``, and ``model``, one of ``TASKS``, which is the same for all.
        root: of the task's data.
        results: a JSON file.
        trained: what a run is.
    """
    task = TASKS[runs[0]["model"]](root)
    for number, run in enumerate(runs):
        figures = trained(run, task)
        if dist.get_rank() == 0:
            Results(results)[run["name"]] = figures
            said = f"held-out loss {figures['held_out']:.4f}, {figures['seconds']:.0f} s"
            print(f"{number + 1}/{len(runs)} {run['name']}: {said}", flush=True)


def descend(
    run: Run, task: Task, given: Mapping[str, Any], make: Callable[..., torch.optim.Optimizer]
) -> dict[str, float]:
    """Train on this rank.

    Args:
        run: what.
        task: of its model.
        given: arguments of ``attach``; with ``rounds``, of ``Local``.
        make: the optimizer, of a model and a rate.

    Returns:
        ``held_out``, the loss; ``training``, that of the last steps of all ranks; ``ratio``, how many times fewer bytes
        a rank sends than stock DDP; and ``seconds``.
    """
    start = time.perf_counter()
    torch.manual_seed(run["seed"])
    module = trained = task.model()
    if "rounds" in given:
        handle: Any = Local(module, given, seed=run["seed"])
        counted, before, after, finish = handle, handle.before, handle.after, handle.finish
    else:
        trained = DistributedDataParallel(module)
        handle = attach(trained, **given, seed=run["seed"])
        counted, before, after, finish = handle.meter, lambda _: None, lambda: None, lambda: None
    optimizer = make(module, run["rate"])
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, run["steps"])
    losses = []
    for _, batch in zip(range(run["steps"]), task.batches(run["seed"], dist.get_rank()), strict=False):
        optimizer.zero_grad()
        loss = trained(batch)
        loss.backward()
        before(optimizer)
        optimizer.step()
        after()
        falling.step()
        losses.append(loss.detach())
    finish()
    last = torch.stack(losses[-LAST:]).mean()
    dist.all_reduce(last)
    ratio = counted.bytes_dense / counted.bytes_sent
    handle.close()
    sums, count = task.losses(module, 0, 1)[0].tolist()
    training = float(last) / dist.get_world_size()
    return {"held_out": sums / count, "training": training, "ratio": ratio, "seconds": time.perf_counter() - start}


def table(results: Results, runs: list[Run], same: Sequence[str], title: str) -> None:
    """Print held-out losses by seed, and over those of dense averaging with the same seed.

    Args:
        results: of the runs.
        runs: which; a seed's dense run is one of them, or nothing is compared with it.
        same: what a row's runs have in common; the last of it is ``method``.
        title: of the table.
    """
    rows: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        rows.setdefault(tuple(run[each] for each in same), []).append(run)
    held_out = {run["name"]: results[run["name"]]["held_out"] for run in runs}
    dense = {(run.get("optimizer"), run["seed"]): held_out[run["name"]] for run in runs if run["method"] == "dense"}
    cells = []
    for key, mine in rows.items():
        losses = [held_out[run["name"]] for run in mine]
        over = [held_out[run["name"]] / dense.get((run.get("optimizer"), run["seed"]), math.nan) for run in mine]
        by_seed = (" ".join(f"{each:.4f}" for each in column) for column in (losses, over))
        ratio = results[mine[0]["name"]]["ratio"]
        cells.append((*map(str, key), *by_seed, f"{statistics.mean(over):.4f}", f"{ratio:.1f} x"))
    show((*same, "loss, by seed", "/ dense, by seed", "mean", "fewer bytes"), cells, title)
