"""Measure a user's script for ``lightning-compress advise --script``."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.collectives import TorchCollective
from lightning_compress.planning.decide import on_one_machine
from lightning_compress.planning.link import agreed, time_link
from lightning_compress.planning.script_steps import FEWEST, MOST, SECONDS, WARM, ScriptSteps
from lightning_compress.settings.compensation import kind_of


@dataclass
class Step:
    """Moments of one optimizer step, by ``Clock``.

    Args:
        began: when the step before ended.
        ended: when the batch ended.
        ready: when the gradient of each parameter was complete, by index; unused ones are missing.
    """

    began: Any
    ended: Any = None
    ready: dict[int, Any] = field(default_factory=dict)


class Clock:
    """Reads the time without waiting for a GPU, whose events tell it later.

    Args:
        device: where the model trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """Return this moment."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments."""
        if self._device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class ScriptMixin:
    """Makes a ``Callback`` one that measures a script; see ``ScriptProfile``."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        self._folder = Path(folder)
        self._steps: list[Step] = []
        self._stepped, self._total = 0, MOST + WARM

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the script leave no checkpoint, and validate on one batch only."""
        if stage != "fit":
            return
        trainer.strategy.save_checkpoint = trainer.strategy.remove_checkpoint = _ignored
        for each in trainer.checkpoint_callbacks:
            if getattr(each, "save_last", None) == "link":  # would replace a link by one to a file that is not written
                each.save_last = True
        trainer.num_sanity_val_steps = 0
        if trainer.limit_val_batches:  # not 0: learning rates may depend on a validation's metric
            trainer.limit_val_batches = 1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Turn off the average of gradients, and begin to measure.

        Raises:
            ValueError: several processes train, but not by DistributedDataParallel.
        """
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = False
        elif trainer.world_size > 1:
            raise ValueError(
                f"advise measures scripts that train with DDP, or in one process; {type(trainer.strategy).__name__} "
                "trains otherwise. Start the script with strategy='ddp'"
            )
        self._clock, self._stepped = Clock(pl_module.device), trainer.global_step
        trained = [each for each in pl_module.parameters() if each.requires_grad]
        for index, parameter in enumerate(trained):
            parameter.register_post_accumulate_grad_hook(partial(self._mark, index))
        self._now = Step(self._clock.now())

    def _mark(self, index: int, parameter: Tensor) -> None:
        self._now.ready[index] = self._clock.now()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Do not count how long an epoch's first batch was waited for: its workers started."""
        if batch_idx == 0:
            self._now.began = self._clock.now()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Do not count a validation."""
        if not trainer.sanity_checking:
            self._now.began = self._clock.now()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure a step; after the last one, write what was found and end the process."""
        if trainer.global_step == self._stepped:  # it accumulates
            return
        self._stepped, self._now.ended = trainer.global_step, self._clock.now()
        self._steps.append(self._now)
        if len(self._steps) == WARM + FEWEST:
            self._total = WARM + self._affordable(trainer, pl_module)
        if len(self._steps) >= self._total:
            self._end(trainer, pl_module)
        self._now = Step(self._clock.now())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what there is if the fit was short."""
        if self._steps:
            self._end(trainer, pl_module)

    def _affordable(self, trainer: Any, module: Any) -> int:
        """Return how many steps count, the same on all ranks."""
        count = float(min(MOST, max(FEWEST, round(SECONDS / max(1e-6, self._median(self._steps[WARM:]))))))
        return int(agreed([count], TorchCollective(), module.device)[0] if trainer.world_size > 1 else count)

    def _median(self, steps: Sequence[Step]) -> float:
        return statistics.median(self._clock.seconds(each.began, each.ended) for each in steps)

    def _end(self, trainer: Any, module: Any) -> None:
        """Write the figures; end this process at once, so that nothing after the fit runs, and no file is written."""
        steps = self._steps[min(WARM, len(self._steps) - 1) :]
        compute_s = self._median(steps)
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        processes = int(getattr(trainer.strategy, "num_processes", 1))
        found = ScriptSteps(
            compute_ms=1e3 * compute_s,
            optimizer=kind_of(trainer.optimizers) or "adam",
            parameters=[(name, list(each.shape)) for name, each in trained],
            ready=[self._ready(index, steps, compute_s) for index in range(len(trained))],
            steps=len(steps),
            batches=trainer.accumulate_grad_batches,
            dtype=str(trained[0][1].dtype if trained else torch.float32).removeprefix("torch."),
            device=torch.cuda.get_device_name(module.device) if module.device.type == "cuda" else module.device.type,
            cores_per_rank=_cores() / processes,
            rank=trainer.global_rank,
            ranks=trainer.world_size,
            **(_network(module.device) if trainer.world_size > 1 else {}),
        )
        part = self._folder / f"{found.rank}.part"
        part.write_text(json.dumps(asdict(found)))
        part.replace(self._folder / f"{found.rank}.json")
        if trainer.world_size > 1:
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _ready(self, index: int, steps: Sequence[Step], compute_s: float) -> float | None:
        """Return the part of a step after which a gradient is complete; None: it never was."""
        parts = [self._clock.seconds(each.began, each.ready[index]) for each in steps if index in each.ready]
        return min(1.0, statistics.median(parts) / compute_s) if parts else None


def _network(device: torch.device) -> dict[str, Any]:
    """Return what is between the ranks. Collective."""
    ranks = TorchCollective()
    link = time_link(ranks, device)
    latency_s, bytes_per_s = agreed([link.latency_s, link.bytes_per_s], ranks, device)
    found = {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
    return {"link": found, "one_machine": on_one_machine(ranks, device)}


def _ignored(*_: Any, **__: Any) -> None:
    """Save and remove nothing."""


def _cores() -> int:
    """Return the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ScriptProfile(ScriptMixin, Callback):
    """Measures computing alone in a few steps of a fit, writes it to a folder, and ends the process.

    Gradients are not averaged, no checkpoint is saved or removed, and a validation takes one batch. Lightning adds this
    callback to the Trainers of a script that ``lightning-compress advise --script`` started, in all its processes.

    Args:
        folder: where each rank writes ``<rank>.json``.
    """
