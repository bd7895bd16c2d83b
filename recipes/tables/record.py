"""What a training cost and came to: measured while it runs, and written beside it as ``result.json``."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from recipes.loading import release
from recipes.task import Score

__all__ = ["FILE", "Recorder", "describe", "read_result", "report", "writable", "write_result", "write_whole"]

FILE = "result.json"
WARM_STEPS = 10
"""Steps whose time does not count in the median: buckets and buffers are still being made."""
COSTS = (
    "steps",
    "seconds",
    "step_ms",
    "bytes_per_step",
    "dense_bytes_per_step",
    "ratio",
    "total_bytes_sent",
    "total_bytes_dense",
)
"""Of a training: optimizer steps, seconds in them, the median step, and bytes that rank 0 sent, or would have sent."""
LIBRARIES = ("lightning-compress", "torch", "lightning", "torchmetrics", "hydra-core", "numpy")


class Recorder(Callback):
    """Times the training steps, and knows what rank 0 sent so far.

    The clock runs within training epochs, so that it has the loading of data and the exchange, and neither validation
    nor the checkpoints at an epoch's end. Bytes are those of a strategy that tells them; else they are 0. Every
    ``log_every_n_steps`` steps the loggers get ``time/seconds`` and ``time/step_ms``; loggers with a ``so_far`` mapping
    find there, after every step, ``time/seconds`` and ``comm/total_bytes_sent``. When the training ends, the figures of
    ``COSTS`` are in ``trainer.callback_metrics`` as ``run/...``, also in the process that spawned the ranks.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps: list[float] = []
        self.traffic: dict[str, float] = {}
        self._before: dict[str, Any] = {"steps": 0, "traffic": {}}
        self._since = self._step = self._paused = 0.0
        self._done = 0

    def state_dict(self) -> dict[str, Any]:
        """So that a resumed run goes on counting."""
        return {"seconds": self.seconds, "steps": self._before["steps"] + len(self.steps), "traffic": self.traffic}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``state_dict``."""
        self.seconds, self._before = state_dict["seconds"], self._before | state_dict
        self.traffic = dict(state_dict["traffic"])  # which may be saved again before a step is made

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See from where the steps count; a run that goes on in the middle of an epoch begins none."""
        self._done = trainer.global_step
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._since, self._step = time.perf_counter(), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop it."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on."""
        self._since += time.perf_counter() - self._paused

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the clock, and close the step where this batch ended one."""
        now = time.perf_counter()
        self.seconds += now - self._since
        self._step += now - self._since
        self._since = now
        if trainer.global_step == self._done:
            return  # gradients accumulate
        self._done = trainer.global_step
        self.steps.append(self._step)
        self._step = 0.0
        self._look(trainer)
        seconds = {"time/seconds": self.seconds}
        for logger in trainer.loggers:
            if hasattr(logger, "so_far"):
                logger.so_far = seconds | {"comm/total_bytes_sent": self.traffic.get("total_bytes_sent", 0.0)}
        row = trainer.fit_loop.epoch_loop._batches_that_stepped  # what self.log goes by
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (row + 1) % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(seconds | {"time/step_ms": 1e3 * self.steps[-1]}, row)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the figures where the process that started the ranks finds them."""
        costs = self.costs(trainer)
        trainer.callback_metrics.update(
            {f"run/{name}": torch.tensor(costs[name], dtype=torch.float64) for name in COSTS}
        )

    def _look(self, trainer: Trainer) -> None:
        """Add what was sent since this process began to what was sent before."""
        now, before = _traffic(trainer), self._before["traffic"]
        self.traffic = {name: now.get(name, 0.0) + before.get(name, 0.0) for name in now | before}

    def costs(self, trainer: Trainer) -> dict[str, float]:
        """What the training cost so far, by the names of ``COSTS``."""
        self._look(trainer)
        sent, taken = self.traffic, self._before["steps"] + len(self.steps)
        total, dense = sent.get("total_bytes_sent", 0.0), sent.get("total_bytes_dense", 0.0)
        steps = max(taken, 1)
        timed = self.steps[WARM_STEPS:] or self.steps[-1:] or [0.0]
        return {
            "steps": float(taken),
            "seconds": self.seconds,
            "step_ms": 1e3 * statistics.median(timed),
            "bytes_per_step": total / steps,
            "dense_bytes_per_step": dense / steps,
            "ratio": dense / total if total else 1.0,
            "total_bytes_sent": total,
            "total_bytes_dense": dense,
        }


def _traffic(trainer: Trainer) -> dict[str, float]:
    if not hasattr(trainer.strategy, "compression"):
        return {}
    over = getattr(trainer.strategy, "synchroniser", None)
    meters = over.meters if over else [trainer.strategy.compression.meter]
    return {
        "total_bytes_sent": float(sum(meter.bytes_sent for meter in meters)),
        "total_bytes_dense": float(sum(meter.bytes_dense for meter in meters)),
    }


def describe(score: Score, metrics: dict[str, Tensor], **facts: Any) -> dict[str, Any]:
    """Everything about a finished run that a table needs.

    Args:
        score: what the recipe is judged by.
        metrics: what was logged, and the ``run/...`` figures of ``Recorder``.
        **facts: whatever else, such as recipe, compressor, seed, ranks.

    Returns:
        What ``json`` can write: ``score`` with metric, label, goal and value; the ``COSTS``; ``facts``; ``metrics``;
        versions, date and command.
    """
    value = float(metrics[score.metric])
    return {
        "score": {"metric": score.metric, "label": score.label, "goal": score.goal, "value": value},
        "written": score.written(value),
        **{name: float(metrics.get(f"run/{name}", float("nan"))) for name in COSTS},
        **facts,
        "metrics": {name: float(each) for name, each in metrics.items() if not name.startswith("run/")},
        "versions": {"python": platform.python_version(), **{name: release(name) for name in LIBRARIES}},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "recipes.train", *sys.argv[1:]]),
    }


def writable(folder: str | Path, *, make: bool = True) -> Path:
    """See that files can be written to a folder, which need not be there yet.

    Args:
        folder: path of it.
        make: it is made, which a file system may refuse.

    Returns:
        it, as an absolute path.

    Raises:
        ValueError: they cannot.
    """
    path = Path(folder).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    problem = "is no folder" if not there.is_dir() else "is not writable"
    try:
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            if make:
                path.mkdir(parents=True, exist_ok=True)
            return path
    except OSError as error:
        problem = f"takes no folder ({error.strerror})"
    raise ValueError(f"output folder {str(folder)!r}: {there} {problem}; choose another, as in hydra.run.dir=DIR")


@rank_zero_only
def report(result: dict[str, Any], folder: Path, checkpoint: str) -> None:
    """Print a finished run's score and how to use its checkpoint, "" if none was kept, and write the result."""
    saving = f", {result['ratio']:.1f} x fewer bytes than float32" if result["ratio"] > 1 else ""
    print(f"test {result['score']['label']} {result['written']}{saving}")
    if checkpoint:
        print(f"try it: python -m recipes.predict {shlex.quote(os.path.relpath(checkpoint))} INPUT")
    write_result(folder, result)


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write ``result.json`` into a folder, whole or not at all."""
    with write_whole(folder / FILE) as file:
        file.write(json.dumps(result, indent=2) + "\n")


@contextmanager
def write_whole(path: Path) -> Iterator[TextIO]:
    """Open a file that takes the old one's place when it is closed; not where an error comes between."""
    draft = path.with_name(f".{path.name}.part")
    with draft.open("w", newline="") as file:
        yield file
    draft.replace(path)


def read_result(folder: Path) -> dict[str, Any] | None:
    """What a finished run left in its folder; None: it has not finished."""
    try:
        result: dict[str, Any] = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        return None
    return result
