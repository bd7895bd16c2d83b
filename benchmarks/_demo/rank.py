"""One rank of the demo: trains what it is told, then times steps at every rate."""

from __future__ import annotations

import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from hydra import compose, initialize_config_dir
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel

from benchmarks._demo.entries import RATES, Entry
from benchmarks._demo.pace import Wire, pace
from benchmarks.harness.lab import bits_per_second, set_rate
from lightning_compress import CompressedDDPStrategy
from recipes import task as recipe
from recipes.config import CONF, build

QUIET = [
    "trainer=cpu_2proc",
    "trainer.enable_progress_bar=false",
    "trainer.enable_checkpointing=false",
    "trainer.enable_model_summary=false",
    "trainer.limit_val_batches=0",
    "logger=none",
    "exchange.link={latency_s: 1e-4, bytes_per_s: 1.25e8}",  # not measured: the same bytes on every machine
]
SECONDS = 3.0
"""For the steps of a cell, as far as FEWEST and MOST allow."""
FEWEST, MOST = 5, 12
"""Steps that are timed at each rate."""


def find(told: dict[str, Any]) -> dict[str, Any]:
    """Do every task; return ``rows``.

    Args:
        told: ``tasks``; ``paced``, whether links are played.
    """
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return {"rows": [row for given in told["tasks"] for row in rows_of(Entry(*given), paced=told["paced"])]}


def rows_of(task: Entry, *, paced: bool) -> list[dict[str, Any]]:
    """Train a task with each of its methods, and time the steps of each.

    Args:
        task: what.
        paced: play the links, in place of shaping those of the namespace.
    """
    start, data, rows = time.perf_counter(), None, []
    for method, overrides in task.methods.items():
        words = [*task.overrides, *overrides]
        say(f"python -m recipes.train {' '.join(words)}")
        cfg = composed([*words, *QUIET])
        data = data or build(cfg.data)
        found = train(cfg, data)
        ms = time_steps(cfg, data, found.pop("parameters"), paced=paced)
        seconds, start = time.perf_counter() - start, time.perf_counter()
        say(f"    {found['label']} {found['value']:.1f}{found['unit']}, {seconds:.0f} s")
        rows.append({"task": task.name, "method": method, **found, "ms": ms})
    return rows


def say(line: str) -> None:
    """Show how far it is, on one rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def composed(overrides: list[str]) -> DictConfig:
    """What ``python -m recipes.train`` would run."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", [*overrides, "output_dir=."])


def train(cfg: DictConfig, data: LightningDataModule) -> dict[str, Any]:
    """Train and test: the score, and the bytes of a step.

    Args:
        cfg: the composed config.
        data: built from it, perhaps in use before.
    """
    model, trainer = started(cfg, data)
    trainer.fit(model, datamodule=data)
    assert isinstance(trainer.strategy, CompressedDDPStrategy)
    stats = trainer.strategy.comm_stats()
    trainer.test(model, datamodule=data, verbose=False)
    score = model.score
    return {
        "label": score.label,
        "value": round(score.scale * float(trainer.callback_metrics[score.metric]), 1),
        "unit": score.unit,
        "higher": score.goal == "maximize",
        "bytes_per_step": stats["bytes_sent"],
        "ratio": stats["ratio"],
        "parameters": sum(each.numel() for each in model.parameters()),
    }


def started(
    cfg: DictConfig, data: Any, callbacks: list[Callback] | None = None, **arguments: Any
) -> tuple[recipe.Task, Trainer]:
    """A model and a Trainer, from the same seed each time."""
    gc.collect()
    seed_everything(cfg.seed, workers=True, verbose=False)
    model: recipe.Task = build(cfg.recipe, **data.dims)
    return model, build(cfg.trainer, callbacks=callbacks or [], **arguments)


def time_steps(cfg: DictConfig, data: LightningDataModule, parameters: int, *, paced: bool) -> dict[str, int]:
    """Median milliseconds of a step, by rate, in a few steps of a new training.

    Args:
        cfg: the composed config.
        data: built from it.
        parameters: of the model, which decide how many steps are timed: as many for each method.
        paced: play the links.
    """
    slowest = 4 * parameters / min(bits_per_second(rate) / 8 for rate in RATES.values())
    steps = min(MOST, max(FEWEST, round(SECONDS / slowest)))
    wire = Wire()
    timer = Timer(steps, wire.limit, wire) if paced else Timer(steps, set_rate)
    model, trainer = started(cfg, data, [timer], max_epochs=-1, **timer.limits)
    trainer.fit(model, datamodule=data)
    return {name: round(1e3 * statistics.median(seconds[1:])) for name, seconds in timer.seconds.items()}


class Timer(Callback):
    """Takes the time of steps at one rate after the other, after an epoch that does not count.

    All epochs have the same batches, as many as a rate's turn. The first one makes what a batch's shape needs: buffers,
    buckets, and oneDNN's kernels, which are compiled for each length of an LSTM's sequences.

    Args:
        steps: at each rate, and one before them, in which the link's traffic settles.
        limit: sets a rate; None: no limit.
        wire: is played.

    Attributes:
        limits: arguments for the Trainer.
    """

    def __init__(self, steps: int, limit: Callable[[str | None], None], wire: Wire | None = None) -> None:
        self.limits = {"max_steps": (1 + len(RATES)) * (steps + 1), "limit_train_batches": steps + 1}
        self.seconds: dict[str, list[float]] = {name: [] for name in RATES}
        self._plan = {turn * (steps + 1): name for turn, name in enumerate(RATES, start=1)}
        self._limit, self._wire = limit, wire
        self._now: str | None = None

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Get hold of what is to be played, and let every epoch shuffle as the first one."""
        assert trainer.train_dataloader is not None
        trainer.train_dataloader.sampler.set_epoch = lambda epoch: None  # which recipes call after any callback
        if self._wire:
            assert isinstance(trainer.strategy, CompressedDDPStrategy)
            assert isinstance(trainer.strategy.model, DistributedDataParallel)
            pace(trainer.strategy.model, trainer.strategy.compression, self._wire)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Set the next rate when it is its turn, and start the clock."""
        if trainer.global_step in self._plan:
            dist.barrier()  # nothing is on its way
            self._now = self._plan[trainer.global_step]
            self._limit(RATES[self._now])
        dist.barrier()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop it."""
        if self._now:
            self.seconds[self._now].append(time.perf_counter() - self._start)

    def on_train_end(self, *_: Any) -> None:
        """Lift the limit."""
        dist.barrier()
        self._limit(None)
