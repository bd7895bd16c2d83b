"""One rank of a script whose steps are timed: ``python -m benchmarks._scripts.timed FILE STEPS RATES MODULE WORDS``.

Lightning is given a callback, as an installed package could give it one. It ends the process after the last step.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.trainer.connectors import callback_connector

from benchmarks.harness.lab import set_rate

WARM = 3
"""Steps at each rate that do not count."""


class Timer(Callback):
    """Times steps at one rate after the other.

    Args:
        result: where rank 0 writes the median milliseconds, by rate.
        steps: at each rate.
        rates: as tc takes them.
    """

    def __init__(self, result: Path, steps: int, rates: list[str]) -> None:
        self._result, self._steps, self._rates = result, steps + WARM, rates
        self._seconds: dict[str, list[float]] = {rate: [] for rate in rates}
        self._done, self._start = 0, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the next rate when it is its turn; do not count the wait for an epoch's first batch."""
        turn, step = divmod(self._done, self._steps)
        if not step:
            dist.barrier()  # nothing is on its way
            if turn:
                set_rate(None)
            set_rate(self._rates[turn])
            dist.barrier()
        if not step or not batch_idx:
            self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the time of a step."""
        now = time.perf_counter()
        turn, step = divmod(self._done, self._steps)
        if step >= WARM:
            self._seconds[self._rates[turn]].append(now - self._start)
        self._done += 1
        if self._done == self._steps * len(self._rates):
            dist.barrier()
            if not trainer.global_rank:
                found = {rate: 1e3 * statistics.median(each) for rate, each in self._seconds.items()}
                self._result.write_text(json.dumps(found))
            os._exit(0)
        self._start = time.perf_counter()


if __name__ == "__main__":
    file, count, names, module, *words = sys.argv[1:]
    timer = Timer(Path(file), int(count), names.split(","))
    callback_connector._load_external_callbacks = lambda group: [timer]  # type: ignore[attr-defined]
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
