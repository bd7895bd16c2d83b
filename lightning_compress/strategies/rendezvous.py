"""Where ranks meet: are they at the same batch, and has a cluster's signal come to any of them, or time run out?

Strategies whose ranks train alone have them meet every so many steps, and wait. Where they average in every step, a
question travels beside the batches, and its answer is taken a batch later: all hear of it, and none waits.
"""

from __future__ import annotations

import functools
import logging
import math
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_compress.collectives import Collective, TorchCollective, consensus
from lightning_compress.collectives.torch import backend_of
from lightning_compress.core import errors
from lightning_compress.periodic.synchroniser import Meeting

STEP, END, ELSEWHERE = range(3)
"""Ranks meet in a step, at the end of the fit, or in a collective call of Lightning's."""
EVERY = 4
"""Batches from one question to the next. An answer is taken a batch later, so a job ends within five. On two ranks a
question takes 0.1 ms of the main thread, and Lightning's broadcast, in every batch, 0.2 ms and a round trip."""

_GROUP = (
    "connecting the ranks by Gloo (where a host's own name resolves to 127.0.x.x, others cannot reach it: set "
    "GLOO_SOCKET_IFNAME to the network interface between the hosts, such as eth0)"
)


class Rendezvous(Meeting):
    """The ranks of one fit.

    Args:
        trainer: of the fit; its signal handlers are not registered yet.
        ranks: for small tensors; where ranks average in every step the default group, as in Lightning's own broadcast.
        device: of these; on CUDA questions travel on a stream beside the batches, which only the answer waits for.

    Attributes:
        signals: what a cluster asked for.
    """

    def __init__(self, trainer: Any, ranks: Collective, device: torch.device) -> None:
        super().__init__(ranks, device)
        self.signals, self._trainer, self._where = Signals(trainer), trainer, STEP
        self._batches, self._beside = 0, _Beside(ranks, device) if device.type == "cuda" else None
        self._asked: Callable[[], Tensor] | None = None

    @classmethod
    def everywhere(cls, trainer: Any, device: torch.device) -> Rendezvous:
        """In the default process group; on the CPU if it can."""
        return cls(trainer, TorchCollective(), torch.device("cpu") if backend_of("cpu") else device)

    @classmethod
    def apart(cls, trainer: Any, timeout: timedelta | None) -> Rendezvous:
        """Over a process group of Gloo of its own, on the CPU; ``timeout``: None for the default.

        Raises:
            ExchangeError: the ranks cannot connect.
        """
        with errors.explained(_GROUP, dist.get_rank()):
            group = dist.new_group(backend="gloo", timeout=timeout)
        return cls(trainer, TorchCollective(group), torch.device("cpu"))

    def compare_batches(self, needed: float = math.inf) -> None:
        """Compare numbers of training batches, once loaders are set up.

        Args:
            needed: batches of an epoch, which may differ where all ranks have as many.

        Raises:
            ValueError: they differ; on all ranks.
        """
        known = self._trainer.num_training_batches
        own = torch.tensor([-1 if math.isinf(known) else int(known)], device=self.device)
        counts = consensus.gathered(own, self.ranks).flatten().tolist()
        self.unsized = -1 in counts or bool(self._trainer.reload_dataloaders_every_n_epochs)
        if len(set(counts)) > 1 and min(counts) < needed:
            said = ", ".join("unknown" if each < 0 else str(each) for each in counts)
            raise ValueError(
                f"the ranks have different numbers of training batches ({said}, by rank), and would wait for each "
                "other for ever; give all the same (a DistributedSampler does), or set limit_train_batches"
            )

    def vote(self) -> Tensor:
        """See ``Meeting``."""
        loop, told = self._trainer.fit_loop, self.signals
        place = self._where, loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready
        words = [told.end, told.save, told.stop, *place, *(-each for each in place)]
        return torch.cat([super().vote(), torch.tensor(words, dtype=torch.int64)])

    def apply_votes(self, votes: Tensor) -> None:
        """See ``Meeting``."""
        super().apply_votes(votes)
        _, _, end, save, stop, *place = votes.tolist()
        if place[:3] != [-each for each in place[3:]]:
            loop = self._trainer.fit_loop
            raise ValueError(
                f"the ranks have different numbers of training batches: rank {self.ranks.rank} is at batch "
                f"{loop.epoch_loop.batch_progress.current.ready} of epoch {loop.epoch_progress.current.processed}, and "
                "another rank elsewhere, or an optimizer's step was skipped on one of them; give all the same number, "
                "or set limit_train_batches, and in manual optimization step on all ranks or on none"
            )
        self.signals.agreed(bool(end), bool(save), bool(stop))

    def agree(self, own: Sequence[int] = (), where: int = STEP) -> list[int]:
        """See ``Meeting``; SIGTERM to one is for all."""
        self._where = where
        try:
            return super().agree(own)
        finally:
            self._where = STEP

    def next_batch(self) -> None:
        """Take the last question's answer, ask the next, or neither; save what is to be saved.

        Raises:
            ExchangeError: a rank died, or did not come in time.
        """
        if not self.signals.taken:
            return
        self._take()
        self.signals.act()
        if self._batches % EVERY == 0:
            self._asked = self._beside.ask(self.vote()) if self._beside else self._begin(self.vote().to(self.device))
        self._batches += 1

    def finish(self) -> None:
        """The last batch is done: ask once more, and wait for the answer."""
        if self.signals.taken:
            self._take()
            self.agree(where=END)
            self.signals.act()

    def _begin(self, words: Tensor) -> Callable[[], Tensor]:
        wait = self.ranks.begin_all_reduce(words, "max")
        return lambda: (wait(), words)[1]

    def _take(self) -> None:
        if self._asked is not None:
            answer, self._asked = self._asked, None
            with errors.explained("asking the others whether a signal came", self.ranks.rank):
                said = answer().cpu()
            self.apply_votes(said)

    def close(self, waits: bool = False) -> None:
        """The fit is over; ``waits``: a rank may still wait in the process group, and the exit ends that."""
        self._asked = None
        self.signals.release()
        if not waits:
            self.ranks.close()


class _Beside:
    """Asks on a stream of its own, from pinned memory and into it: one question at a time."""

    def __init__(self, ranks: Collective, device: torch.device) -> None:
        self._ranks, self._device, self._stream = ranks, device, torch.cuda.Stream(device)
        self._words: Tensor | None = None

    def ask(self, words: Tensor) -> Callable[[], Tensor]:
        if self._words is None:
            self._words = torch.empty_like(words).pin_memory()
            with torch.cuda.stream(self._stream):
                self._there = torch.zeros(len(words), dtype=torch.int64, device=self._device)
        self._words.copy_(words)
        with torch.cuda.stream(self._stream):
            self._ranks.begin_all_reduce(self._there.copy_(self._words, non_blocking=True), "max")()
            self._words.copy_(self._there, non_blocking=True)
            event = self._stream.record_event()
        found = self._words

        def answer() -> Tensor:
            event.synchronize()
            return found

        return answer


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
