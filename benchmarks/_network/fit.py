"""One rank of the lab that trains by Lightning's Trainer: with its broadcast in every batch, and without."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks._network.methods import optimizer, settings
from benchmarks.harness.models import MODELS, batch
from benchmarks.harness.rank import COUNTER
from lightning_compress import CompressedDDPStrategy
from lightning_compress.strategies import signals

BROADCAST = ", Lightning's broadcast"
"""After the name of a method where Lightning is left as it is."""


class Module(pl.LightningModule):
    """A model of the lab.

    Args:
        name: of ``MODELS``.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = MODELS[name][0]()

    def training_step(self, inputs: Tensor) -> Tensor:
        """The lab's loss."""
        loss: Tensor = self.model(inputs).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The lab's optimizer."""
        return optimizer(self.model)


class Clock(pl.Callback):
    """Seconds and bytes from the end of a batch to that of the next, all that Lightning does included.

    Args:
        warm: batches before those that count.
    """

    def __init__(self, warm: int) -> None:
        self._warm = warm
        self._seen: list[tuple[float, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Look."""
        self._seen.append((time.perf_counter(), int(COUNTER.read_text())))

    def between(self) -> list[tuple[float, int]]:
        """Of the batches that count."""
        seen = self._seen[self._warm - 1 :]
        return [(then - before, more - sent) for (before, sent), (then, more) in pairwise(seen)]


def find(told: dict[str, Any]) -> dict[str, Any]:
    """Train with each method, alone and beside Lightning's broadcast, in turn."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    labels = [name + more for name in told["methods"] for more in ("", BROADCAST)]
    found: dict[str, list[tuple[float, int]]] = {label: [] for label in labels}
    for number in range(told["rounds"]):
        turn = number % len(labels)
        for label in labels[turn:] + labels[:turn]:
            found[label] += fit(told, label, told["steps"] // told["rounds"])
    medians = {label: 1e3 * statistics.median(each for each, _ in seen) for label, seen in found.items()}
    sent = {label: statistics.mean(each for _, each in seen) for label, seen in found.items()}
    return {"ms": medians, "wire_bytes": sent}


def fit(told: dict[str, Any], label: str, steps: int) -> list[tuple[float, int]]:
    """Seconds and bytes of each batch of one fit."""
    torch.manual_seed(0)
    clock = Clock(told["warm"])
    given = settings(label.removesuffix(BROADCAST))
    assert given is not None
    total = told["warm"] + steps
    left = mock.patch.object(signals, "LOOP", "none of its names") if label.endswith(BROADCAST) else nullcontext()
    with left:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=told["ranks"],
            strategy=CompressedDDPStrategy(**given),
            max_steps=total,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        inputs = batch(told["model"], told["rank"])
        trainer.fit(Module(told["model"]), DataLoader([inputs] * total, batch_size=None))  # type: ignore[arg-type]
    return clock.between()
