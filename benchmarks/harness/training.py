"""Trainings one after the other, and a loop whose learning rate falls linearly to 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.results import Results
from benchmarks.harness.tasks import TASKS, Learning, Reading

Run = dict[str, Any]
"""``name``, the key of its result, and ``model``, of ``TASKS``; and what else its ``Train`` takes of it."""
Train = Callable[[Run, Reading | Learning], dict[str, float]]
"""Trains on one rank: ``held_out``, the loss, ``seconds``, and other figures."""


def descend(
    loss_of: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """Train, and return the loss of each step.

    Args:
        loss_of: computes that of the next batch.
        optimizer: steps.
        steps: how many.
        before: is called when backward is over.
        after: is called when the optimizer stepped.
    """
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        before()
        optimizer.step()
        after()
        falling.step()
        losses.append(loss.detach())
    return losses


def work(runs: list[Run], root: Path, results: Path, trained: Train, digits: int = 3) -> None:
    """All runs, one after the other, on one rank; rank 0 writes down each result.

    Args:
        runs: each with its ``name``, and ``model``, one of ``TASKS``, which is the same for all.
        root: of the task's data.
        results: a JSON file.
        trained: what a run is.
        digits: of the losses that are printed.
    """
    task = TASKS[runs[0]["model"]](root)
    for number, run in enumerate(runs):
        figures = trained(run, task)
        if dist.get_rank() == 0:
            Results(results)[run["name"]] = figures
            said = f"held-out loss {figures['held_out']:.{digits}f}, {figures['seconds']:.0f} s"
            print(f"{number + 1}/{len(runs)} {run['name']}: {said}", flush=True)
