"""Where ranks meet: are they at the same batch, and has a cluster's signal come to any of them, or time run out?

Strategies whose ranks train alone have them meet every so many steps, and wait. Where they average in every step, a
question travels beside the batches, and its answer is taken a batch later: all hear of it, and none waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_compress.collectives import Collective, TorchCollective, consensus
from lightning_compress.collectives.torch import backend_of
from lightning_compress.core import errors
from lightning_compress.periodic.synchroniser import Meeting
from lightning_compress.strategies.signals import Signals

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

    def ask(self) -> Tensor:
        """See ``Meeting``."""
        loop, told = self._trainer.fit_loop, self.signals
        place = self._where, loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready
        words = [told.end, told.save, told.stop, *place, *(-each for each in place)]
        return torch.cat([super().ask(), torch.tensor(words, dtype=torch.int64)])

    def heed(self, said: Tensor) -> None:
        """See ``Meeting``."""
        super().heed(said)
        _, _, end, save, stop, *place = said.tolist()
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
            self._asked = self._beside.ask(self.ask()) if self._beside else self._begin(self.ask().to(self.device))
        self._batches += 1

    def finish(self) -> None:
        """The last batch is done: ask once more, and wait for the answer."""
        if self.signals.taken:
            self._take()
            self.agree(where=END)
            self.signals.act()

    def _begin(self, words: Tensor) -> Callable[[], Tensor]:
        wait = self.ranks.begin_all_reduce_max(words)
        return lambda: (wait(), words)[1]

    def _take(self) -> None:
        if self._asked is not None:
            answer, self._asked = self._asked, None
            with errors.explained("asking the others whether a signal came", self.ranks.rank):
                said = answer().cpu()
            self.heed(said)

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
            self._ranks.begin_all_reduce_max(self._there.copy_(self._words, non_blocking=True))()
            self._words.copy_(self._there, non_blocking=True)
            event = self._stream.record_event()
        found = self._words

        def answer() -> Tensor:
            event.synchronize()
            return found

        return answer
