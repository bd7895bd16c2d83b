"""The figures of a fit, for the lines at its end."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_compress.engine.compression import Compression
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.predict import BUCKET, Place, predict
from lightning_compress.planning.summary import RunSummary
from lightning_compress.settings.run_state import RunState

Lines = list[tuple[str, str]]
"""What a figure is about, and the figure."""
KEPT = 200
"""Steps whose times are kept."""


class StepClock:
    """The times of the last optimizer steps."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=KEPT)

    def step(self) -> None:
        """Note that a step has ended."""
        self._ends.append(time.perf_counter())

    @property
    def median_ms(self) -> float | None:
        """Median milliseconds of a step, or None before the second one ends."""
        ends = list(self._ends)
        steps = [1e3 * (end - start) for start, end in pairwise(ends)]
        return statistics.median(steps) if steps else None


def of_fit(
    compression: Compression,
    ranks: int,
    step_ms: float | None,
    expects: Callable[[float], Lines] = lambda _: [],
    *,
    hides: bool = True,
) -> Lines:
    """Return the figures of a fit that averaged gradients; nothing if it did not compress.

    Args:
        compression: of the fit.
        ranks: over which it averaged, 1 or more.
        step_ms: median milliseconds of a step, if two or more were taken.
        expects: returns what the cost model predicts, from the milliseconds of a step without what waited for the
            average.
        hides: averages travel beside the backward pass.
    """
    if not compression.active or ranks == 1:
        return []
    stats = compression.stats()
    first = compression.meter.sampled == 1
    lines = [traffic(stats, "step"), *times(stats, step_ms, first=first, hides=hides)]
    if compression.settings.options.delay:
        lines.append(("delay", "the average of the last step was not applied; a checkpoint keeps it"))
    if step_ms is not None and not first:
        lines += expects(max(0.0, step_ms - stats["wait_ms"]))
    return lines


def log_hyperparameters(trainer: Any, runs: RunSummary) -> None:
    """Log what runs together with the module's hyperparameters: some loggers keep only the last call."""
    holders = [holder for holder in (trainer.lightning_module, trainer.datamodule) if holder is not None]
    hyperparameters = {
        name: value
        for holder in holders
        if holder._log_hyperparams
        for name, value in holder.hparams_initial.items()
        if name != "_class_path"  # LightningCLI's own
    }
    for logger in trainer.loggers:
        logger.log_hyperparams(hyperparameters | runs.hyperparameters())


def of_rounds(stats: Mapping[str, Any], every: int, steps: int) -> Lines:
    """Return the figures of a fit whose ranks met every so many steps.

    Args:
        stats: the strategy's ``comm_stats``; its ``ratio`` is the last round's.
        every: steps of a round.
        steps: of all rounds. If the last one was shorter, it says nothing of the others.
    """
    if every == 1 or steps % every:
        return [traffic(stats, "step" if every == 1 else "round")]
    ratio = stats["ratio"]
    return [traffic(stats, "round"), ("ratio", f"{ratio:.3g} x fewer bytes a step, {ratio / every:.3g} x a round")]


def traffic(stats: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """Return how many bytes were sent, and how many stock DistributedDataParallel would have sent."""
    sent, dense = stats["total_bytes_sent"], stats["total_bytes_dense"]
    count = f"{stats['steps']:,.0f} {unit}{'s' * (stats['steps'] != 1)}"
    return "sent", f"{size(sent)} in {count}; float32 would send {size(dense)} ({dense / max(1, sent):.3g} x as much)"


def times(stats: Mapping[str, Any], step_ms: float | None, *, first: bool = False, hides: bool = True) -> Lines:
    """Return what the last measured average took, and what a step did.

    Args:
        stats: of the run.
        step_ms: see ``of_fit``.
        first: the average was that of the run's first step.
        hides: see ``of_fit``.
    """
    parts = {name: stats[f"{name}_ms"] for name in ("encode", "exchange", "decode")}
    hidden = max(0.0, sum(parts.values()) - stats["wait_ms"])
    took = ", ".join(f"{name} {value:.1f} ms" for name, value in parts.items())
    took += f"; of these, {hidden:.1f} ms were hidden behind the backward pass" * hides
    lines = [("average", took + " (in the first step, which also loads kernels)" * first)]
    if step_ms is not None:
        waited = "" if first or not hides else f"; the last one measured waited {stats['wait_ms']:.1f} ms"
        lines.append(("step", f"{step_ms:.1f} ms (median){waited}"))
    return lines


def expected(settings: RunState, model: nn.Module, ranks: int, bucket_mb: float | None, computing_ms: float) -> Lines:
    """Return what the cost model predicts for a step, if ``exchange="auto"`` measured the link.

    Args:
        settings: of the compression.
        model: whose gradients are averaged.
        ranks: 2 or more.
        bucket_mb: DistributedDataParallel's ``bucket_cap_mb``.
        computing_ms: milliseconds of a step without what waited for the average.
    """
    if not isinstance(settings.exchange, Auto) or settings.exchange.link is not None:
        return []
    place = Place(ranks, settings.exchange, BUCKET if bucket_mb is None else int(bucket_mb * 2**20))
    try:
        trained = [(name, tuple(each.shape)) for name, each in model.named_parameters() if each.requires_grad]
        step = predict(settings, trained, place, computing_ms / 1e3)
    except ValueError:  # a method that no model predicts
        return []
    return [("expected", f"{1e3 * step.step_s:.1f} ms a step, by the cost model")]


def size(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def tell(lines: Lines, callbacks: Sequence[Any]) -> None:
    """Log the lines, unless a ``CommunicationMonitor`` prints them as a table."""
    if not any(getattr(callback, "summary", False) is True for callback in callbacks):
        for name, text in lines:
            rank_zero_info(f"lightning_compress: {name}: {text}")
