"""Every few steps, all ranks agree on three things: the batch index, pending signals, and the time limit.

Strategies with a model per rank wait for this agreement. Strategies that average in every step send the question in
parallel with the next batch and read the answer one batch later, so no rank waits.
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
"""Where ranks meet: in a step, at the end of the fit, or in a collective call of Lightning's."""
EVERY = 4
"""Batches between two questions. The answer is read one batch later, so a job ends within five batches of a signal.
On two ranks, a question takes 0.1 ms of the main thread. Lightning's broadcast takes 0.2 ms and a round trip, in every
batch."""

_GROUP = (
    "connecting the ranks by Gloo (if a host's own name resolves to 127.0.x.x, other hosts cannot reach it: set "
    "GLOO_SOCKET_IFNAME to the network interface between the hosts, such as eth0)"
)


class Rendezvous(Meeting):
    """The agreement of all ranks during one fit.

    Args:
        trainer: of the fit; create this before its signal handlers are registered.
        ranks: transport for small tensors. If ranks average in every step, it is the default group, which Lightning's
            own broadcast uses too.
        device: of these tensors. On CUDA, questions use their own stream, and only reading an answer waits for it.

    Attributes:
        signals: the cluster's requests.
    """

    def __init__(self, trainer: Any, ranks: Collective, device: torch.device) -> None:
        super().__init__(ranks, device)
        self.signals, self._trainer, self._where = Signals(trainer), trainer, STEP
        self._batches, self._stream = 0, _Stream(ranks, device) if device.type == "cuda" else None
        self._answer: Callable[[], Tensor] | None = None

    @classmethod
    def everywhere(cls, trainer: Any, device: torch.device) -> Rendezvous:
        """Return one that uses the default process group, on the CPU if the group supports it."""
        return cls(trainer, TorchCollective(), torch.device("cpu") if backend_of("cpu") else device)

    @classmethod
    def apart(cls, trainer: Any, timeout: timedelta | None) -> Rendezvous:
        """Return one that uses its own Gloo process group, on the CPU.

        Args:
            trainer: of the fit.
            timeout: of the group; None: the default.

        Raises:
            ExchangeError: the ranks cannot connect.
        """
        with errors.explained(_GROUP, dist.get_rank()):
            group = dist.new_group(backend="gloo", timeout=timeout)
        return cls(trainer, TorchCollective(group), torch.device("cpu"))

    def compare_batches(self, needed: float = math.inf) -> None:
        """Check that all ranks have equally many training batches per epoch; call once loaders are set up. Collective.

        Args:
            needed: batches until the fit ends. If all ranks have that many, their numbers may differ.

        Raises:
            ValueError: on all ranks: the numbers differ.
        """
        known = self._trainer.num_training_batches
        own = torch.tensor([-1 if math.isinf(known) else int(known)], dtype=torch.int64, device=self.device)
        counts = consensus.gathered(own, self.ranks).flatten().tolist()
        self.unsized = -1 in counts or bool(self._trainer.reload_dataloaders_every_n_epochs)
        if len(set(counts)) > 1 and min(counts) < needed:
            numbers = ", ".join("unknown" if count < 0 else str(count) for count in counts)
            raise ValueError(
                f"the ranks have different numbers of training batches ({numbers}, by rank), so they would wait for "
                "each other forever. Give all ranks the same number (a DistributedSampler does), or set "
                "limit_train_batches"
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
                "another rank is not, or an optimizer's step was skipped on one of them. Give all ranks the same "
                "number, or set limit_train_batches; in manual optimization, step on all ranks or on none"
            )
        self.signals.agreed(bool(end), bool(save), bool(stop))

    def agree(self, own: Sequence[int] = (), where: int = STEP) -> list[int]:
        """See ``Meeting``; a SIGTERM of one rank ends all."""
        self._where = where
        try:
            return super().agree(own)
        finally:
            self._where = STEP

    def next_batch(self) -> None:
        """Read the last answer if one is due, act on it, and ask again every ``EVERY`` batches.

        Raises:
            ExchangeError: a rank died, or did not answer in time.
        """
        if not self.signals.taken:
            return
        self._take()
        self.signals.act()
        if self._batches % EVERY == 0:
            self._answer = self._stream.ask(self.vote()) if self._stream else self._begin(self.vote().to(self.device))
        self._batches += 1

    def finish(self) -> None:
        """Ask once more after the last batch, and wait for the answer."""
        if self.signals.taken:
            self._take()
            self.agree(where=END)
            self.signals.act()

    def _begin(self, words: Tensor) -> Callable[[], Tensor]:
        wait = self.ranks.begin("all_reduce", words, "max")
        return lambda: (wait(), words)[1]

    def _take(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            with errors.explained("asking the others whether a signal came", self.ranks.rank):
                said = answer().cpu()
            self.apply_votes(said)

    def close(self, waits: bool = False) -> None:
        """End the fit; ``waits``: a rank may still wait in the process group, so leave closing it to the exit."""
        self._answer = None
        self.signals.release()
        if not waits:
            self.ranks.close()


class _Stream:
    """Asks on its own CUDA stream, from and into pinned memory; one question at a time."""

    def __init__(self, ranks: Collective, device: torch.device) -> None:
        self._ranks, self._device, self._stream = ranks, device, torch.cuda.Stream(device)
        self._words: Tensor | None = None

    def ask(self, words: Tensor) -> Callable[[], Tensor]:
        if self._words is None:
            self._words = torch.empty_like(words).pin_memory()
            with torch.cuda.stream(self._stream):
                self._on_device = torch.zeros(len(words), dtype=torch.int64, device=self._device)
        self._words.copy_(words)
        with torch.cuda.stream(self._stream):
            self._ranks.begin("all_reduce", self._on_device.copy_(self._words, non_blocking=True), "max")()
            self._words.copy_(self._on_device, non_blocking=True)
            event = self._stream.record_event()
        reduced = self._words

        def answer() -> Tensor:
            event.synchronize()
            return reduced

        return answer


log = logging.getLogger(__name__)

LOOP = "_broadcast_sigterm_tensor"
"""Method of the training epoch loop: Lightning's broadcast after every batch."""
HANDLERS = ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")
"""Methods of the signal connector, Lightning's handlers: one ends the job, one saves it and starts it again."""

CLOCK = "_check_time_remaining"
"""Method of Lightning's Timer: broadcasts whether the time limit is reached."""
TIMERS = (("Timer", "pytorch.callbacks.timer"), ("Timer", "callbacks.timer"))
"""Class name and module (after the package's name) of the Timer in lightning.pytorch and in pytorch_lightning."""


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

    def agreed(self, end: bool, save: bool, stop: bool = False) -> None:
        """Note what at least one rank was asked for, once all ranks know it."""
        if stop and not self._trainer.should_stop:
            rank_zero_info("lightning_compress: the time limit is reached; training stops")
            self._trainer.should_stop = True
        if save:
            number = getattr(self._trainer.strategy.cluster_environment, "requeue_signal", None) or signal.SIGUSR1
            self._due = lambda: self._slurm(number, None)
            self.save = False
        self._ends = self._ends or end
        if self._ends and self._due is None:  # else save first: Lightning ends before the next batch
            self._connector.received_sigterm = True

    def act(self) -> None:
        """Save if the ranks agreed to, then end if they agreed to; call it between two batches."""
        due, self._due = self._due, None
        if due is not None:
            due()
        if self._ends:
            self._connector.received_sigterm = True

    def release(self) -> None:
        """Restore Lightning's own methods."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()
