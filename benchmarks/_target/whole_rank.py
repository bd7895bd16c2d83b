"""One rank of a whole training over a link: its curve, and the seconds until each evaluation."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks._target.methods import runs
from benchmarks._target.tasks import TASKS
from benchmarks._target.timed import SECONDS
from benchmarks._target.training import train


def find(told: dict[str, Any]) -> dict[str, Any]:
    """Return what ``train`` does, and ``seconds`` of all batches up to each evaluation.

    Args:
        told: ``task``, ``root``, ``run``, by its name, and ``rate`` and others of ``train``.
    """
    task, batches = TASKS[told["task"]], told["batches"]
    data, run = task.data(Path(told["root"])), {"by": "timed", "settings": runs(task)[told["run"]]}
    dist.barrier()
    given = told["rate"], told["seed"], batches, told["until"], batches, task.every, task.decay
    found = train(data, run, *given)
    spent = list(accumulate(SECONDS))
    return found | {"seconds": [round(spent[int(row[0]) - 1], 3) for row in found["curve"]]}
