"""One rank of the lab: milliseconds of a batch by each row, rows in turn."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._target.methods import AUTO, rows
from benchmarks._target.tasks import TASKS
from benchmarks._target.training import build
from benchmarks.harness.rank import spanned
from lightning_compress.planning.summary import label

MOST = 1000
"""Cycles of a row in a round."""
RATE = 1e-3
"""Of learning; small, so that no method's numbers overflow in the few steps that are timed."""


def find(told: dict[str, Any]) -> dict[str, Any]:
    """Measure what is told: ``task``, ``rows``, ``root``, ``rounds``, and ``warm`` and ``seconds`` of each round."""
    return Timing(told).run()


class Timing:
    """Time all rows in turn, in rounds, so that what disturbs the machine disturbs all alike.

    Args:
        told: see ``find``.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._told, self._data = told, TASKS[told["task"]].data(Path(told["root"]))
        self._ms: dict[str, list[float]] = {name: [] for name in told["rows"]}
        self._wire: dict[str, list[float]] = {name: [] for name in told["rows"]}
        self._chosen = ""

    def run(self) -> dict[str, Any]:
        """Return by row ``ms`` of a batch, the median; ``spread``, the quartiles' ratio; ``wire_bytes`` of a batch.

        And ``parameters``, and ``chosen``, the compressor that ``auto`` took.
        """
        names = list(self._ms)
        for number in range(self._told["rounds"]):
            first = number * len(names) // self._told["rounds"]
            for name in names[first:] + names[:first]:
                self._round(name)
        module = self._data.model()
        return {
            "ms": {name: round(statistics.median(each), 3) for name, each in self._ms.items()},
            "spread": {name: round(_spread(each), 3) for name, each in self._ms.items()},
            "wire_bytes": {name: round(statistics.median(each)) for name, each in self._wire.items()},
            "parameters": sum(each.numel() for each in module.parameters()),
            "chosen": self._chosen,
        }

    def _round(self, name: str) -> None:
        """Whole cycles of a row, after some that do not count, for a while that rank 0 decides on."""
        torch.manual_seed(0)
        averaging = build(self._data, rows()[name], self._data.model(), RATE)
        if name == AUTO:
            self._chosen = label(averaging.handle.settings.compressor)
        batches = self._data.batches(0, dist.get_rank())
        warm = 1 if averaging.every > 1 else self._told["warm"]  # a cycle warms up by itself
        for number in range(warm + MOST):
            if number == warm:
                begun = time.perf_counter()
            with spanned() as span:
                for _ in range(averaging.every):
                    averaging.batch(next(batches))
            if number >= warm:
                self._ms[name].append(1e3 * span.seconds / averaging.every)
                self._wire[name].append(span.sent / averaging.every)
                done = torch.tensor(int(time.perf_counter() - begun > self._told["seconds"]))
                dist.broadcast(done, 0)  # all ranks stop at the same batch
                if done:
                    break
        averaging.close()
        del averaging
        gc.collect()


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 1.0
    low, _, high = statistics.quantiles(values, n=4)
    return high / low
