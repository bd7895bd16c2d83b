"""Averages of two ranks' models, of which the rank that is asked alone decides.

A rank asks with its model x. The other one, whose model is y, computes the change ``share (x - y)``, adds it to its own
model, and answers with it; the one that asked subtracts it from whatever its model is by then. Both move by the same
numbers, so the mean of all models stays as it is, however late the answer comes. Nobody holds a lock while it waits, so
that every graph will do: the paper needs a bipartite one, in which only one half of the ranks asks.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_compress.contrib.asynchronous.links import FIRST_KIND, Links, Message, Reply
from lightning_compress.contrib.asynchronous.shared_model import CHUNK, SharedModel
from lightning_compress.gossip.algorithm import LARGEST

MODEL, CHANGE, BUSY, CODES, CELLS, AGAIN = range(FIRST_KIND, FIRST_KIND + 6)
"""Kinds of messages: a question, its answer, and the answer of a rank that is not to be moved now. By Moniqua: a
question, its answer, and the answer that codes were not recovered; see ``modulo_pairs.py``."""
MOVED = (CHANGE, CELLS)


class PairwiseAverage:
    """Exact averages in float32.

    Models that many questions move at once would overshoot, since none of these knows of the others. So a rank with
    open questions moves less far, and of two questions that cross on an edge only that of the lower rank counts.

    Args:
        model: of this rank.
        share: the part of the difference that both sides go towards each other where nothing else is open: 0.5 is
            their average. With ``n`` open questions of both sides it is at most ``1 / (1 + n)``.

    Attributes:
        paused: questions are answered with ``BUSY``.
        answered: number of questions that moved this model.
        asked: number of answers that moved this model, by neighbour.
        lags: steps of this rank from its questions to their answers, summed, by neighbour.
    """

    def __init__(self, model: SharedModel, share: float = 0.5) -> None:
        self._model, self._most = model, share
        self._turn = threading.Lock()  # of the answering threads, which share the room for a chunk of the model
        self._own = torch.empty(CHUNK, dtype=torch.float32)
        self._rooms: dict[int, Tensor] = {}
        self._open: dict[int, int] = {}
        self.paused, self.answered = False, 0
        self.asked, self.lags = Counter[int](), Counter[int]()  # the thread that asks a neighbour writes its own

    @property
    def kinds(self) -> Mapping[int, int]:
        """The messages that ``Links`` has to know."""
        return {MODEL: 4 * self._model.numel, CHANGE: 4 * self._model.numel, BUSY: 0}

    def ask(self, links: Links, peer: int) -> bool:
        """Average with a neighbour; return False if it is paused, or asks this rank at the same time.

        Raises:
            GoneError: a rank is gone.
            ValueError: this rank's model is not finite.
        """
        self._open[peer], begun = links.rank, self._model.steps
        try:
            moved = self._ask(links, peer)
        finally:
            del self._open[peer]
        if moved:
            self.asked[peer] += 1
            self.lags[peer] += self._model.steps - begun
        return moved

    def _ask(self, links: Links, peer: int) -> bool:
        room = self._read(peer)
        reply = links.ask(peer, MODEL, len(self._open), parts=[room])
        if reply.kind == BUSY:
            return False
        change = reply.body.view(torch.float32)
        for part in self._model.chunks():
            with self._model.moving(part) as moved:
                moved.sub_(change[part])
        self._learn(peer, reply.number)
        return True

    def _read(self, peer: int) -> Tensor:
        """Return this rank's model, in memory of the thread that asks this neighbour."""
        if peer not in self._rooms:
            self._rooms[peer] = torch.empty(self._model.numel, dtype=torch.float32)
        room = self._rooms[peer]
        total = torch.zeros((), dtype=torch.float32)
        for part in self._model.chunks():
            total += self._model.read(part, room[part]).sum()  # while it is in the cache
        if not float(total.abs()) < LARGEST:
            raise ValueError("its model is not finite, and was not given to others; lower the learning rate")
        return room

    def _learn(self, peer: int, apart: float) -> None:
        """Note how far a neighbour's model was from this one."""

    def answer(self, rank: int, message: Message) -> Reply:
        """See ``Answer``."""
        with self._turn:
            if self.paused or self._open.get(rank, rank) < rank:
                return Reply(BUSY)
            reply = self._answer(rank, message, len(self._open) + message.clock)
            self.answered += reply.kind in MOVED
            return reply

    def _answer(self, rank: int, message: Message, others: int) -> Reply:
        """Move this model, and return what moves the other one.

        Args:
            rank: that asks.
            message: its question.
            others: open questions of both.
        """
        theirs = message.body.view(torch.float32)
        if theirs.numel() != self._model.numel:
            raise ValueError(
                f"rank {rank} sent a model of {theirs.numel():,} parameters, and this one has {self._model.numel:,}; "
                "all ranks must train the same model"
            )
        largest = torch.zeros((), dtype=torch.float32)
        for part in self._model.chunks():
            change = theirs[part].sub_(self._model.read(part, self._own))
            torch.maximum(largest, change.abs().max(), out=largest)  # of NaN it is NaN
        if not float(largest) < LARGEST:  # this rank's model is not finite; its next question says so
            return Reply(BUSY)
        share = self._share(others)
        for part in self._model.chunks():
            change = theirs[part].mul_(share)
            with self._model.moving(part) as moved:
                moved.add_(change)
        return Reply(CHANGE, 0, float(largest), [theirs])

    def _share(self, others: int) -> float:
        return min(self._most, 1 / (1 + max(1, others)))

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the neighbours."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``."""

    def pause(self) -> None:
        """Move this model no more until ``resume``; answers that are under way are finished first."""
        with self._turn:
            self.paused = True

    def resume(self) -> None:
        """Answer questions again."""
        self.paused = False


class Askers:
    """A thread for each neighbour, so that one behind a slow link holds up its own questions alone.

    Args:
        ask: is called with a neighbour, in that one's thread.
        peers: the neighbours.
        seed: of the choice among them.

    Attributes:
        error: of a question that failed, or None.
    """

    def __init__(self, ask: Callable[[int], object], peers: Sequence[int], seed: int) -> None:
        self._ask, self._random = ask, random.Random(seed)
        self._changed = threading.Condition()
        self._idle, self._told = set(peers), set[int]()
        self._asking, self._ended = True, False
        self.error: BaseException | None = None
        for peer in peers:
            name = f"lightning_compress asks {peer}"
            threading.Thread(target=self._run, args=(peer,), name=name, daemon=True).start()

    def step(self) -> None:
        """Ask one of the neighbours, at random, whose answer is not still awaited; nobody if there is none."""
        with self._changed:
            if self._asking and self._idle:
                peer = self._random.choice(sorted(self._idle))
                self._idle.discard(peer)
                self._told.add(peer)
                self._changed.notify_all()

    def pause(self) -> None:
        """Ask nothing more until ``resume``; returns when all answers are here."""
        with self._changed:
            self._asking = False
            self._changed.wait_for(lambda: not self._told)

    def resume(self) -> None:
        """Ask again."""
        with self._changed:
            self._asking = True

    def close(self) -> None:
        """End the threads when their last answers are here."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self, peer: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or peer in self._told)
                if self._ended:
                    return
            try:
                with torch.no_grad():
                    self._ask(peer)
            except BaseException as error:
                self.error = error
            with self._changed:
                self._told.discard(peer)
                self._idle.add(peer)
                self._changed.notify_all()
