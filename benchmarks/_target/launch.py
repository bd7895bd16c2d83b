"""Start the ranks of a training run as forks of this process, which has imported everything already."""

from __future__ import annotations

import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks._target.methods import Run
from benchmarks._target.tasks import Task
from benchmarks._target.training import Data, builder, train
from benchmarks.harness.lab import Here, die_with_parent


def run_ranks(task: Task, data: Data, run: Run, *given: Any) -> dict[str, Any]:
    """Return what ``training.train`` found, and ``seconds``.

    This process must not have computed anything with several threads before, which a fork would wait for in vain.

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
    with tempfile.TemporaryDirectory() as folder:
        told = (Path(folder), task, data, run, given)
        torch.multiprocessing.start_processes(_rank, told, task.ranks, start_method="fork")  # type: ignore[attr-defined, no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def _rank(rank: int, folder: Path, task: Task, data: Data, run: Run, given: tuple[Any, ...]) -> None:
    die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = Here.interface
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # at rates that are too high, batches of an LSTM would take ten times as long
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=task.ranks, timeout=timedelta(minutes=10))
    given = (*given, task.every, task.decay)
    found = train(data, run, *given)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
