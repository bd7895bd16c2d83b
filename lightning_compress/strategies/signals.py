"""What one rank is asked for (a signal, a time limit, a stop), and what becomes of it once all ranks know."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info

from lightning_compress.core import errors
from lightning_compress.strategies.advice import finds_rate

STEP, END, EVALUATION, ELSEWHERE = range(4)
"""Where ranks meet: in a step, at the end of the fit, before an evaluation, or in a collective call of Lightning's."""
LOOP = "_broadcast_sigterm_tensor"
"""Method of the training epoch loop: Lightning's broadcast after every batch."""
HANDLERS = ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")
"""Methods of the signal connector, Lightning's handlers: one ends the job, one saves it and starts it again."""

CLOCK = "_check_time_remaining"
"""Method of Lightning's Timer: broadcasts whether the time limit is reached."""
TIMERS = (("Timer", "pytorch.callbacks.timer"), ("Timer", "callbacks.timer"))
"""Class name and module (after the package's name) of the Timer in lightning.pytorch and in pytorch_lightning."""


class Place(NamedTuple):
    """Where a rank is when all meet.

    Args:
        where: one of the above.
        halves: epochs begun plus epochs ended, so that it is odd within an epoch.
        batch: batches that the epoch has begun.
        stops: ``ASKED`` or ``TIMED`` if this rank is to stop, else 0.
    """

    where: int
    halves: int
    batch: int
    stops: int

    def __str__(self) -> str:
        done, within = divmod(self.halves, 2)
        if self.where == END:
            return "at the end of the fit"
        return f"at batch {self.batch} of epoch {done}" if within else f"at the end of epoch {done - 1}"


ASKED, TIMED = 1, 2
"""Why a rank is to stop: something has set ``trainer.should_stop`` on it, or its Timer's limit is reached."""


class Signals:
    """Replace Lightning's own agreement on signals for one fit; do nothing if Lightning's internals have changed.

    Create it in the strategy's ``setup``, before the signal handlers are registered. Lightning acts on the ranks'
    agreement at the end of the batch, as on a SIGTERM.

    Args:
        trainer: of the fit.

    Attributes:
        taken: whether Lightning's own agreement is replaced.
        end: whether SIGTERM arrived on this rank.
        save: whether the cluster's signal to save and requeue the run arrived on this rank.
        stop: whether a Timer's limit is reached on this rank.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._connector = trainer, trainer._signal_connector
        loop = trainer.fit_loop.epoch_loop
        broadcasts = [name for name in dir(loop) if name.startswith("_broadcast")]  # Lightning 2.5 has none
        self.taken = broadcasts in ([], [LOOP]) and all(hasattr(self._connector, name) for name in HANDLERS)
        self.end = self.save = self.stop = self._ends = False
        self._asked = self._stopped = False
        self._stop_from: int | None = None
        self._due: Callable[[], None] | None = None
        self._replaced: list[tuple[Any, str]] = []
        if self.taken:
            self._slurm = self._connector._slurm_sigusr_handler_fn
            self._replace(loop, LOOP, lambda: None)
            self._replace(self._connector, HANDLERS[0], self._note_end)
            self._replace(self._connector, HANDLERS[1], self._note_save)

    def around(
        self, owner: Any, name: str, first: Callable[[], object] | None = None, then: Callable[[], object] | None = None
    ) -> None:
        """Call something before a method of one of Lightning's loops and after it, until ``release``."""
        method = getattr(owner, name)

        def around(*given: Any) -> None:
            if first is not None:
                first()
            method(*given)
            if then is not None:
                then()

        self._replace(owner, name, around)

    def unless(self, owner: Any, name: str, refused: Callable[[], bool]) -> None:
        """Leave calls of a callback's method out where ``refused``, until ``release``."""
        method = getattr(owner, name)

        def unless(*given: Any) -> None:
            if not refused():
                method(*given)

        self._replace(owner, name, unless)

    def _replace(self, owner: Any, name: str, by: Callable[..., None]) -> None:
        vars(owner)[name] = by
        self._replaced.append((owner, name))

    def _note_end(self, number: int, _: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self.end and launcher is not None:  # forwards the signal to the processes that it started
            launcher.kill(number)
        self.end = True

    def _note_save(self, number: int, _: Any) -> None:
        self.save = True

    def watch_clocks(self) -> None:
        """Make Timers note after each batch that their limit is reached; they broadcast only before the first."""
        for timer in self._trainer.callbacks:
            kinds = {(cls.__name__, cls.__module__.partition(".")[2]) for cls in type(timer).__mro__}
            known = not kinds.isdisjoint(TIMERS) and hasattr(timer, CLOCK)
            if known and timer._interval == "step":
                self._replace(timer, CLOCK, functools.partial(self._note_time, timer))

    def _note_time(self, timer: Any, _: Any) -> None:
        left = timer.time_remaining()
        self.stop = self.stop or (left is not None and left <= 0)

    @property
    def halves(self) -> int:
        """See ``Place``."""
        epochs = self._trainer.fit_loop.epoch_progress.current
        return int(epochs.started + epochs.processed)

    @property
    def stops(self) -> int:
        """See ``Place``."""
        return TIMED if self.stop else ASKED * (self._asked or self._trainer.should_stop)

    @property
    def pending(self) -> bool:
        """Whether this rank has been asked for what the others do not know yet."""
        return self.end or self.save or (bool(self.stops) and not self._stops)

    @property
    def _stops(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self._stopped or self._stop_from is not None

    def hold_back(self) -> None:
        """Keep this rank from stopping alone, until all ranks agree to stop. A search for a rate stops all together."""
        trainer = self._trainer
        self._stopped = self._stopped and trainer.should_stop
        if trainer.should_stop and not self._stopped and not finds_rate(trainer.callbacks):
            self._asked, trainer.should_stop = True, False

    def agreed(self, end: bool, save: bool, places: Sequence[Place] = ()) -> None:
        """Note what at least one rank was asked for, once all ranks know it; ``places`` are those of all ranks."""
        asking = [rank for rank, place in enumerate(places) if place.stops]
        if asking and not self._stops:
            if any(place.stops == TIMED for place in places):
                rank_zero_info("lightning_compress: the time limit is reached; training stops")
            elif len(asking) < len(places):
                whose = errors.listed([*map(str, asking)])
                rank_zero_info(f"lightning_compress: rank {whose} has set trainer.should_stop; all ranks stop")
            self._asked, self._stop_from = False, max(place.halves for place in places)
            self.stop_if_due()
        if save:
            number = getattr(self._trainer.strategy.cluster_environment, "requeue_signal", None) or signal.SIGUSR1
            self._due = lambda: self._slurm(number, None)
            self.save = False
        self._ends = self._ends or end
        if self._ends and self._due is None:  # else save first: Lightning ends before the next batch
            self._connector.received_sigterm = True

    def stop_if_due(self) -> None:
        """Stop this rank once it is where the furthest one was; then all ranks evaluate and save alike."""
        if self._stop_from is not None and self.halves >= self._stop_from:
            self._stop_from, self._stopped, self._trainer.should_stop = None, True, True

    def act(self) -> None:
        """Save if the ranks agreed to, then end or stop if they agreed to; call it between two batches."""
        due, self._due = self._due, None
        if due is not None:
            due()
        if self._ends:
            self._connector.received_sigterm = True
        self.stop_if_due()

    def release(self) -> None:
        """Restore Lightning's own methods."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()
