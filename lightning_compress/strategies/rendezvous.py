"""Every few steps, all ranks agree on three things: the batch index, pending signals, and the time limit.

Strategies with a model per rank wait for this agreement. Strategies that average in every step send the question in
parallel with the next batch and read the answer one batch later, so no rank waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_compress.collectives import Collective, TorchCollective, consensus
from lightning_compress.collectives.torch import backend_of
from lightning_compress.core import errors
from lightning_compress.periodic.synchroniser import Meeting
from lightning_compress.strategies.signals import ELSEWHERE, END, STEP, Place, Signals

EVERY = 4
"""Batches between two questions. The answer is read one batch later, so a job ends within five batches of a signal.
On two ranks, a question takes 0.1 ms of the main thread. Lightning's broadcast takes 0.2 ms and a round trip, in every
batch."""

_GROUP = (
    "connecting the ranks by Gloo (if a host's own name resolves to 127.0.x.x, other hosts cannot reach it: set "
    "GLOO_SOCKET_IFNAME to the network interface between the hosts, such as eth0)"
)
_BASE = "ModelHooks.on_train_batch_start"
"""Lightning's own hook, which does nothing."""


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
        own = [-1 if math.isinf(known) else int(known), self._may_end_early()]
        table = consensus.gathered(torch.tensor(own, dtype=torch.int64, device=self.device), self.ranks)
        counts, early = table.T.tolist()
        self.unsized = -1 in counts or any(early) or bool(self._trainer.reload_dataloaders_every_n_epochs)
        if len(set(counts)) > 1 and min(counts) < needed:
            numbers = ", ".join("unknown" if count < 0 else str(count) for count in counts)
            raise ValueError(
                f"the ranks have different numbers of training batches ({numbers}, by rank), so they would wait for "
                "each other forever. Give all ranks the same number (a DistributedSampler does), or set "
                "limit_train_batches"
            )

    def _may_end_early(self) -> bool:
        """Return whether an epoch of this rank may end before its last batch."""
        loaders = self._trainer.fit_loop._combined_loader.flattened
        streams = any(isinstance(getattr(each, "dataset", None), IterableDataset) for each in loaders)
        hook = getattr(self._trainer.lightning_module.on_train_batch_start, "__qualname__", "")
        return streams or hook != _BASE  # a hook may return -1

    @property
    def place(self) -> Place:
        """Where this rank is."""
        loop, told = self._trainer.fit_loop, self.signals
        return Place(self._where, told.halves, loop.epoch_loop.batch_progress.current.ready, told.stops)

    def vote(self) -> Tensor:
        """See ``Meeting``; each rank fills its own row of a table of places."""
        places = torch.full((self.ranks.size, len(Place._fields)), -1, dtype=torch.int64)
        places[self.ranks.rank] = torch.tensor(self.place, dtype=torch.int64)
        words = torch.tensor([self.signals.end, self.signals.save], dtype=torch.int64)
        return torch.cat([super().vote(), words, places.flatten()])

    def apply_votes(self, votes: Tensor) -> None:
        """See ``Meeting``."""
        super().apply_votes(votes)
        places = [Place(*row) for row in votes[4:].view(self.ranks.size, -1).tolist()]
        self._compare(places)
        self.signals.agreed(bool(votes[2]), bool(votes[3]), places)

    def comparable(self, place: Place) -> tuple[int, ...]:
        """Return what has to be equal on all ranks."""
        return place[:3]

    def _compare(self, places: Sequence[Place]) -> None:
        """Raise ValueError, on all ranks, if some of them are elsewhere."""
        found = dict[tuple[int, ...], list[int]]()
        for rank, place in enumerate(places):
            found.setdefault(self.comparable(place), []).append(rank)
        if len(found) > 1:
            fewest, *_, most = sorted(found.values(), key=len)
            raise ValueError(
                f"the ranks have different numbers of training batches: rank {errors.listed([*map(str, fewest)])} is "
                f"{places[fewest[0]]}, and rank {errors.listed([*map(str, most)])} {places[most[0]]}; or an "
                "optimizer's step was skipped on one of them. Give all ranks the same number, or set "
                "limit_train_batches; return -1 from on_train_batch_start on all ranks or on none; in manual "
                "optimization, step on all ranks or on none"
            )

    def agree(self, own: Sequence[int] = (), where: int = STEP) -> list[int]:
        """See ``Meeting``; a SIGTERM of one rank ends all."""
        self._where = where
        try:
            return super().agree(own)
        finally:
            self._where = STEP

    def watch_stops(self) -> None:
        """Let no rank stop alone: what sets ``trainer.should_stop`` is a request, until all ranks agree on it."""
        if self.ranks.size > 1:
            signals, loop = self.signals, self._trainer.fit_loop
            signals.around(loop, "setup_data", then=signals.hold_back)  # after on_fit_start
            signals.around(loop, "on_advance_start", then=signals.hold_back)  # on_train_epoch_start
            signals.around(loop.epoch_loop, "on_advance_end", first=signals.hold_back)  # on_train_batch_end
            signals.around(loop, "on_advance_end", then=self.end_epoch)

    def end_epoch(self) -> None:
        """Agree on what hooks at the end of an epoch have asked for. Collective."""
        self.agree(where=ELSEWHERE)

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
