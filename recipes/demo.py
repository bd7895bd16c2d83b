"""Compare compressors on ResNet-20 and real images in one pair of processes: ``python -m recipes.demo``.

Lightning starts the second process once, by running this module again; all trainings share the pair.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from lightning_compress import CompressedDDPStrategy
from recipes.resnet.digits import Digits
from recipes.resnet.module import ResNetModule

__all__ = ["main"]

COMPRESSORS: dict[str, str | dict[str, object]] = {
    "none": "none",
    "bf16": "bf16",
    "fp16": "fp16",
    "onebit": "onebit",
    "topk 1 %": {"name": "topk", "density": 0.01},
    "fft 85 %": {"name": "fft", "theta": 0.85},
}
"""What is compared, by the label in the table; a new line here is a new row there."""

EPOCHS = 15
WARM_STEPS = 10
"""Steps that are not timed: buckets and buffers are still being made."""


class Result(NamedTuple):
    """One training: accuracy in [0, 1], bytes a rank sends per step, and seconds of its median step."""

    accuracy: float
    bytes_per_step: float
    ratio: float
    seconds: float


class StepTimer(Callback):
    """Collects the seconds that each training step took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self._start)


def run(compressor: str | dict[str, object], epochs: int = EPOCHS) -> Result:
    """Train ResNet-20 on digits in two Gloo processes, from the same seed each time.

    Args:
        compressor: what ``CompressedDDPStrategy`` takes.
        epochs: length of the training, at least 1.
    """
    seed_everything(0, workers=True, verbose=False)
    timer = StepTimer()
    strategy = CompressedDDPStrategy(compressor=compressor, process_group_backend="gloo")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    data = Digits(batch_size=32)
    model = ResNetModule(
        num_classes=data.num_classes, in_channels=data.in_channels, batch_size=32, schedule="linear", warmup_epochs=1
    )
    trainer.fit(model, datamodule=data)
    stats = strategy.comm_stats()
    trainer.test(model, datamodule=data, verbose=False)
    return Result(
        accuracy=float(trainer.callback_metrics["test/acc"]),
        bytes_per_step=stats["bytes_sent"],
        ratio=stats["ratio"],
        seconds=statistics.median(timer.seconds[WARM_STEPS:]),
    )


@rank_zero_only
def report(results: dict[str, Result], seconds: float) -> None:
    """Print the table and what it does not show."""
    table = Table(title="ResNet-20 on handwritten digits, 2 processes", title_justify="left")
    table.add_column("compressor")
    for heading in ("accuracy", "bytes per step", "ratio", "step time"):
        table.add_column(heading, justify="right")
    for label, row in results.items():
        table.add_row(
            label,
            f"{100 * row.accuracy:.1f} %",
            f"{row.bytes_per_step:,.0f}",
            f"{row.ratio:.1f} x",
            f"{1e3 * row.seconds:.1f} ms",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{EPOCHS} epochs each, {seconds:.0f} s in all; bytes are what each rank sends. The two processes share one "
        "machine, where a megabyte travels in a millisecond or two: nearly all of a step is computing, and compression "
        "can only add its own few ms. It pays where bytes set the pace: on a slow link between machines.",
        highlight=False,
    )


@rank_zero_only
def progress(label: str) -> None:
    """Say what is running."""
    print(f"training with compressor {label} ...", flush=True)


def main() -> None:
    """Train with every compressor of ``COMPRESSORS`` and print the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")  # about workers, samplers, progress: of no use in a demo
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    start = time.perf_counter()
    results = {}
    for label, compressor in COMPRESSORS.items():
        progress(label)
        results[label] = run(compressor)
    report(results, time.perf_counter() - start)


if __name__ == "__main__":
    main()
