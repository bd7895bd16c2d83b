"""Measure how long a step computes, for ``lightning-compress advise``."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_compress.collectives.counting import now
from lightning_compress.settings.compensation import kind_of


class ProfileMixin:
    """Makes a ``Callback`` a profile of steps; see ``StepProfile``."""

    def __init__(self, path: str | PathLike[str] = "profile.json", steps: int = 30, warm: int = 5) -> None:
        if not (type(steps) is type(warm) is int and steps >= 1 and warm >= 0):
            raise ValueError(f"StepProfile(steps={steps!r}, warm={warm!r}): steps must be 1 or more, warm 0 or more")
        self.path, self.steps, self.warm = Path(path), steps, warm
        self._ends: list[float] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the folder; raise if several processes train: their steps would include communication."""
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise ValueError(
                f"StepProfile measures computing alone, and {trainer.world_size} processes also communicate: train on "
                "one, with Trainer(devices=1, num_nodes=1)"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure."""
        self._ends = [now(pl_module.device)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure a step; write the profile after the last one that counts."""
        if len(self._ends) <= self.warm + self.steps:
            self._ends.append(now(pl_module.device))
            if len(self._ends) == self.warm + self.steps + 1:
                self._write(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what there is if the fit was short."""
        if 1 < len(self._ends) <= self.warm + self.steps:
            self._write(trainer, pl_module)

    def _write(self, trainer: Any, module: Any) -> None:
        ends = self._ends[min(self.warm, len(self._ends) - 2) :]
        steps = [1e3 * (end - start) for start, end in pairwise(ends)]
        trained = [(name, list(each.shape)) for name, each in module.named_parameters() if each.requires_grad]
        optimizer = kind_of(trainer.optimizers) or "adam"  # as ``advise`` assumes of what it is not told
        found = {"compute_ms": statistics.median(steps), "optimizer": optimizer, "parameters": trained}
        self.path.write_text(json.dumps(found))


class StepProfile(ProfileMixin, Callback):
    """Writes the median time of a step, the parameters' shapes and the kind of the optimizer to a file.

    Train on one process, for a few steps: ``Trainer(devices=1, max_steps=35, callbacks=[StepProfile()])``. Then
    ``lightning-compress advise --profile profile.json --ranks 8 --gbit 1`` predicts the steps of several. A step is a
    batch; with accumulation, its time is that of one batch.

    Args:
        path: of the file, JSON.
        steps: that count, 1 or more.
        warm: steps before those, 0 or more.

    Raises:
        ValueError: a number is out of range; in ``setup``, if several processes train.
    """
