"""Start the ranks of a training run as forks of this process, which has imported everything already."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks._target.methods import Run
from benchmarks._target.tasks import Task
from benchmarks._target.training import Data, builder, train
from benchmarks.harness.launch import run_beside


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
    builder(run)  # here, or every rank would import it by itself
    found: dict[str, Any] = run_beside(task.ranks, _train, task, data, run, given, start="fork")[0]
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def _train(task: Task, data: Data, run: Run, given: tuple[Any, ...]) -> dict[str, Any]:
    torch.set_flush_denormal(True)  # at rates that are too high, batches of an LSTM would take ten times as long
    given = (*given, task.every, task.decay)
    return train(data, run, *given)
