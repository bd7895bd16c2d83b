"""Any other method, with a clock around each batch, which stands still while the weights are evaluated."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from benchmarks._target.averaging import Averaging, MakeOptimizer
from benchmarks._target.training import builder

SECONDS: list[float] = []
"""Of each batch so far."""


def build(settings: dict[str, Any], module: nn.Module, optimizer: MakeOptimizer) -> Averaging:
    """Build a method and time it; collective.

    Args:
        settings: a run of ``methods``.
        module: returns the loss of a batch.
        optimizer: makes one.
    """
    averaging: Averaging = builder(settings).build(settings["settings"], module, optimizer)
    batch = averaging.batch

    def timed(inputs: Any) -> None:
        start = time.perf_counter()
        batch(inputs)
        SECONDS.append(time.perf_counter() - start)

    averaging.batch = timed  # type: ignore[method-assign]
    return averaging
