"""What a cluster's signals and clocks ask for: noted when they do, and done where the ranks meet.

Lightning broadcasts a flag after every batch, and again in its handler of SIGTERM. Both wait for the other ranks; where
ranks meet every so many steps only, or send in a thread, that would hold them up, or mix up their collectives. So does
its Timer, which ``Trainer(max_time=...)`` is too: it has rank 0's clock broadcast after every batch.
"""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

log = logging.getLogger(__name__)

LOOP = "_broadcast_sigterm_tensor"
"""Lightning's broadcast after every batch, a method of the training epoch loop."""
HANDLERS = ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")
"""Lightning's handlers, methods of the signal connector: the job is to end; it is to be saved and started again."""

CLOCK = "_check_time_remaining"
"""Lightning's broadcast of whether time is over, a method of its Timer."""
TIMERS = (("Timer", "pytorch.callbacks.timer"), ("Timer", "callbacks.timer"))
"""Which is one of lightning.pytorch's or of pytorch_lightning's."""


class Signals:
    """Takes the place of Lightning's rendezvous in one fit; where Lightning has another one by now, of none.

    Create it before the signal handlers are registered, in the strategy's ``setup``. Lightning acts on what was agreed:
    at the end of the batch, as on a SIGTERM of its own.

    Args:
        trainer: of the fit.

    Attributes:
        taken: Lightning's rendezvous are replaced.
        end: SIGTERM arrived on this rank.
        save: so did the cluster's signal to save the run and start it again.
        stop: a Timer's time is over on this rank.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._connector = trainer, trainer._signal_connector
        loop = trainer.fit_loop.epoch_loop
        self.taken = hasattr(loop, LOOP) and all(hasattr(self._connector, name) for name in HANDLERS)
        self.end = self.save = self.stop = self._ends = False
        self._due: Callable[[], None] | None = None
        self._replaced: list[tuple[Any, str]] = []
        if self.taken:
            self._slurm = self._connector._slurm_sigusr_handler_fn
            self._replace(loop, LOOP, lambda: None)
            self._replace(self._connector, HANDLERS[0], self._note_end)
            self._replace(self._connector, HANDLERS[1], self._note_save)

    def _replace(self, owner: Any, name: str, by: Callable[..., None]) -> None:
        vars(owner)[name] = by
        self._replaced.append((owner, name))

    def _note_end(self, number: int, _: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self.end and launcher is not None:  # which forwards it to the processes that it started
            launcher.kill(number)
        self.end = True

    def _note_save(self, number: int, _: Any) -> None:
        self.save = True

    def watch_clocks(self) -> None:
        """Have Timers only note that their time is over, after every batch; before the first they broadcast it."""
        for timer in self._trainer.callbacks:
            kinds = {(each.__name__, each.__module__.partition(".")[2]) for each in type(timer).__mro__}
            known = not kinds.isdisjoint(TIMERS) and hasattr(timer, CLOCK)
            if known and timer._interval == "step":
                self._replace(timer, CLOCK, functools.partial(self._note_time, timer))

    def _note_time(self, timer: Any, _: Any) -> None:
        left = timer.time_remaining()
        self.stop = self.stop or (left is not None and left <= 0)

    def agreed(self, end: bool, save: bool, stop: bool = False) -> None:
        """The ranks have met, in an optimizer's step, and one of them at least was told this."""
        if stop and not self._trainer.should_stop:
            rank_zero_info("lightning_compress: the time limit is reached; training stops")
            self._trainer.should_stop = True
        if save:
            number = getattr(self._trainer.strategy.cluster_environment, "requeue_signal", None) or signal.SIGUSR1
            self._due = lambda: self._slurm(number, None)
            self.save = False
        self._ends = self._ends or end
        if self._ends and self._due is None:  # else it is saved first: Lightning ends before the next batch
            self._connector.received_sigterm = True

    def act(self) -> None:
        """Save what was agreed to be saved, then end if that was, too; to be called between two batches."""
        due, self._due = self._due, None
        if due is not None:
            due()
        if self._ends:
            self._connector.received_sigterm = True

    def release(self) -> None:
        """Give Lightning its own back."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()
