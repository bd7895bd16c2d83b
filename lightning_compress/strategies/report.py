"""The figures of a fit, for the lines at its end."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_compress.collectives import TorchCollective, World
from lightning_compress.collectives.counting import KEPT, Meter
from lightning_compress.engine.checks import trained_parameters
from lightning_compress.engine.compression import Compression
from lightning_compress.planning import payoff
from lightning_compress.planning.predict import BUCKET
from lightning_compress.planning.summary import RunSummary
from lightning_compress.settings.run_state import RunState
from lightning_compress.strategies.rendezvous import Rendezvous

Lines = list[tuple[str, str]]
"""What a figure is about, and the figure."""
LONG = 10.0
"""Seconds of training after which the end may take a second more, to measure the link."""

LEAST = 5
"""Steps without which a fit says nothing about another one's: the first ones also load kernels."""


class StepClock:
    """The times of the last optimizer steps, from where one begins to where the next one does.

    Args:
        every: steps of a round, of which one or some also wait for an average; 1: there are no rounds.

    Attributes:
        paid: what a step took, beside DistributedDataParallel's, once all ranks have ended the fit; or empty.
    """

    paid = ""

    def __init__(self, every: int = 1) -> None:
        self._every, self._count = every, 0
        self._times = deque[tuple[int, float]](maxlen=max(KEPT, 3 * every))
        self._first = self._last = 0.0
        self._open = False

    def step(self) -> None:
        """Note that a step begins."""
        now = time.perf_counter()
        if self._open:
            self._times.append((self._count % self._every, now - self._last))
        self._first, self._last = self._first or now, now
        self._count, self._open = self._count + 1, True

    def pause(self) -> None:
        """Leave out the step that runs, because something else takes time too, such as an evaluation."""
        self._open = False

    @property
    def kept(self) -> int:
        """How many steps' times are kept."""
        return len(self._times)

    @property
    def seconds(self) -> float:
        """Seconds from the first step to the last one."""
        return self._last - self._first

    def _medians(self) -> list[float] | None:
        """Return the median seconds of each step of a round; None before two rounds have ended."""
        steps = [[took for place, took in self._times if place == each] for each in range(self._every)]
        least = min(2, self._every)
        return [statistics.median(each) for each in steps] if all(len(each) >= least for each in steps) else None

    @property
    def median_s(self) -> float | None:
        """Median seconds of a step, with its share of what a round waits; None: too few steps."""
        medians = self._medians()
        return statistics.fmean(medians) if medians else None

    @property
    def alone_s(self) -> float | None:
        """Median seconds of a step of a round that waits for nobody; None: too few steps."""
        medians = self._medians()
        return statistics.median_low(medians) if medians else None


def of_fit(compression: Compression, ranks: int, clock: StepClock, *, hides: bool = True) -> Lines:
    """Return the figures of a fit that averaged gradients; nothing if it neither compressed nor chose not to.

    Args:
        compression: of the fit.
        ranks: 1 or more.
        clock: of its steps.
        hides: averages travel beside the backward pass.
    """
    lines, paid = Lines(), clock.paid
    if compression.active and ranks > 1:
        stats = compression.stats()
        lines = [traffic(stats, "step"), average(stats, first=compression.meter.sampled == 1, hides=hides)]
        if compression.settings.options.delay:
            lines.append(("delay", "the average of the last step was not applied; a checkpoint keeps it"))
        if not paid and clock.median_s is not None:
            paid = f"{payoff.milliseconds(clock.median_s)} (median)"
    return [*lines, ("step", paid)] if paid else lines


def settle(strategy: Any, compression: Compression, clock: StepClock, meeting: Rendezvous | None) -> None:
    """Find out what DistributedDataParallel's step would take, and keep it in ``clock.paid``. Collective.

    All ranks call it once they are known to be at the end of the fit.

    Args:
        strategy: of the fit.
        compression: of the fit.
        clock: of its steps.
        meeting: of the ranks; None: there is one rank.
    """
    settings = compression.settings
    if meeting is not None and meeting.signals.taken and (settings.chosen or not payoff.dense(settings)):
        run = _run(strategy, settings, clock, None if payoff.dense(settings) else compression.meter)
        clock.paid = _paid(strategy, settings, run, clock, meeting)


def settle_rounds(strategy: Any, clock: StepClock) -> None:
    """Do the same for a ``PeriodicStrategy``; nothing if its ranks do not exchange one mean every few steps."""
    synchroniser = strategy.synchroniser
    settings, every = synchroniser.averaging, synchroniser.steps_per_count
    if settings is not None and every > 1 and strategy.world_size > 1 and not strategy.gives_up:
        run = _run(strategy, settings, clock, synchroniser.meter, every)
        clock.paid = _paid(strategy, settings, run, clock, strategy.rendezvous)


def _paid(strategy: Any, settings: RunState, run: payoff.Run | None, clock: StepClock, meeting: Rendezvous) -> str:
    device = strategy.root_device
    votes = World(meeting.ranks, meeting.device, Meter(meeting.device))
    able = clock.seconds >= LONG and not strategy.lightning_module.trainer.received_sigterm
    where = payoff.look(settings, run, votes, World(TorchCollective(), device, Meter(device)), able)
    return payoff.sentence(run, where) if run else ""


def _run(strategy: Any, settings: RunState, clock: StepClock, meter: Meter | None, every: int = 1) -> payoff.Run | None:
    """Return what a fit trained and how long it took; None if its steps say nothing about another one's."""
    trained = trained_parameters(strategy.lightning_module)
    step_s, warm = clock.median_s, settings.dense_steps * every
    if (
        step_s is None
        or clock.kept < LEAST
        or len(strategy.optimizers) != 1
        or any(each.element_size() != 4 for _, each in trained)
    ):
        return None
    if meter is not None and warm and meter.steps * every - warm < clock.kept:  # dense steps are among them
        return None
    if every > 1:
        computing_s = clock.alone_s
    else:
        wait_ms = None if meter is None else meter.median_wait_ms
        computing_s = None if wait_ms is None else max(0.0, step_s - wait_ms / 1e3)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cap = strategy._ddp_kwargs.get("bucket_cap_mb")
    return payoff.Run(
        settings=settings,
        parameters=[(name, tuple(each.shape)) for name, each in trained],
        ranks=strategy.world_size,
        step_s=step_s,
        computing_s=computing_s,
        bucket_bytes=BUCKET if cap is None else int(cap * 2**20),
        hides=strategy.root_device.type != "cpu" or cores > strategy.num_processes,
        batches=strategy.lightning_module.trainer.accumulate_grad_batches,
        every=every,
    )


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


def of_rounds(stats: Mapping[str, Any], every: int, steps: int, clock: StepClock) -> Lines:
    """Return the figures of a fit whose ranks met every so many steps.

    Args:
        stats: the strategy's ``comm_stats``; its ``ratio`` is the last round's.
        every: steps of a round.
        steps: of all rounds. If the last one was shorter, it says nothing of the others.
        clock: of its steps.
    """
    lines = [traffic(stats, "step" if every == 1 else "round")]
    if every > 1 and steps % every == 0:
        ratio = stats["ratio"]
        lines.append(("ratio", f"{ratio:.3g} x fewer bytes a step, {ratio / every:.3g} x a round"))
    return [*lines, ("step", clock.paid)] if clock.paid else lines


def traffic(stats: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """Return how many bytes were sent, and how many stock DistributedDataParallel would have sent."""
    sent, dense = stats["total_bytes_sent"], stats["total_bytes_dense"]
    count = f"{stats['steps']:,.0f} {unit}{'s' * (stats['steps'] != 1)}"
    return "sent", f"{size(sent)} in {count}; float32 would send {size(dense)} ({dense / max(1, sent):.3g} x as much)"


def average(stats: Mapping[str, Any], *, first: bool = False, hides: bool = True) -> tuple[str, str]:
    """Return what the last measured average took.

    Args:
        stats: of the run.
        first: that was the run's first step.
        hides: see ``of_fit``.
    """
    parts = {name: stats[f"{name}_ms"] for name in ("encode", "exchange", "decode")}
    hidden = max(0.0, sum(parts.values()) - stats["wait_ms"])
    took = ", ".join(f"{name} {value:.1f} ms" for name, value in parts.items())
    took += f"; of these, {hidden:.1f} ms were hidden behind the backward pass" * hides
    return "average", took + " (in the first step, which also loads kernels)" * first


def size(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def tell(lines: Lines, trainer: Any) -> None:
    """Log the lines, or let each ``CommunicationMonitor(summary=True)`` print them as a table; on rank 0."""
    asked = [each for each in trainer.callbacks if getattr(each, "summary", False) is True]
    tables = [each for each in asked if hasattr(each, "show")]
    for table in tables if trainer.is_global_zero else ():
        table.show(lines)
    for name, text in () if tables else lines:
        rank_zero_info(f"lightning_compress: {name}: {text}")
