"""What an elastic job runs: go on from the last checkpoint, if there is one.

    python -m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=1 -m benchmarks._faults.elastic DIR

Rank 1 kills itself in step 5 the first time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from benchmarks._faults.injection import Fault
from benchmarks._faults.training import Job, digest, fit


class Start(pl.Callback):
    """Remembers what the ranks begin with."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """The first step has not begun."""
        saved = trainer.strategy.compression.state_dict()  # type: ignore[attr-defined]
        self.step = trainer.global_step
        self.residual = {
            name: float(part.norm())
            for group in saved["groups"]
            for one in [group["states"]["residual"]]
            for name, part in zip(one["names"], one["numbers"].split(one["numels"]), strict=True)
        }


def main() -> None:
    """Train on this rank, and write down how it began and ended."""
    folder, rank = sys.argv[1], int(os.environ["RANK"])
    job = Job(folder, "topk", int(os.environ["WORLD_SIZE"]), resume="last", fault="killed in forward", victim=1, at=5)
    died, start = Path(folder, "died"), Start()
    callbacks: list[pl.Callback] = [start]
    if not died.exists():
        callbacks.append(Fault(job, rank))
    if rank == job.victim:
        died.touch()
    model, strategy = fit(job, callbacks)
    told = digest(model, strategy) | {"started at": start.step, "started with": start.residual}
    Path(folder, f"elastic{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
