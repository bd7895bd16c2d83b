"""Averages of two ranks' models, of which the rank that is asked alone decides.

A rank asks with its model x. The other one, whose model is y, computes the change ``share (x - y)``, adds it to its own
model, and answers with it; the one that asked subtracts it from whatever its model is by then. Both move by the same
numbers, so the mean of all models stays as it is, however late the answer comes. Nobody holds a lock while it waits, so
that every graph will do: the paper needs a bipartite one, in which only one half of the ranks asks.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_compress.asynchronous.shared_model import SharedModel
from lightning_compress.collectives.links import FIRST_KIND, Links, Message, Reply

MODEL, CHANGE, BUSY = range(FIRST_KIND, FIRST_KIND + 3)
"""Kinds of messages: a question, its answer, and the answer of a rank that is not to be moved now."""


class PairwiseAverage:
    """Exact averages in float32.

    Args:
        model: of this rank.
        share: the part of the difference that both sides go towards each other: 0.5 is their average.

    Attributes:
        paused: questions are answered with ``BUSY``.
        answered: number of questions that moved this model.
        apart: the largest difference of an element from a neighbour's, in the last answer that was given.
    """

    def __init__(self, model: SharedModel, share: float = 0.5) -> None:
        self._model, self._share = model, share
        self._turn = threading.Lock()  # of the answering threads, which share the room for this rank's model
        self._own = torch.empty(model.numel)
        self._asking: dict[int, Tensor] = {}
        self.paused, self.answered, self.apart = False, 0, 0.0

    @property
    def kinds(self) -> Mapping[int, int]:
        """The messages that ``Links`` has to know."""
        return {MODEL: 4 * self._model.numel, CHANGE: 4 * self._model.numel, BUSY: 0}

    def ask(self, links: Links, peer: int) -> bool:
        """Average with a neighbour; return False if that one is paused.

        Raises:
            GoneError: a rank is gone.
        """
        room = self._asking.setdefault(peer, torch.empty(self._model.numel))
        self._model.read(room)
        reply = links.ask(peer, MODEL, parts=[room])
        if reply.kind == BUSY:
            return False
        self._model.move(reply.body.view(torch.float32), -1.0)
        return True

    def answer(self, rank: int, message: Message) -> Reply:
        """See ``Answer``."""
        theirs = message.body.view(torch.float32)
        if theirs.numel() != self._model.numel:
            raise ValueError(
                f"rank {rank} sent a model of {theirs.numel():,} parameters, and this one has {self._model.numel:,}; "
                "all ranks must train the same model"
            )
        with self._turn:
            if self.paused:
                return Reply(BUSY)
            self._model.read(self._own)
            change = theirs.sub_(self._own)
            self.apart = float(change.abs().max()) if len(change) else 0.0
            self._model.move(change.mul_(self._share))
            self.answered += 1
        return Reply(CHANGE, parts=[change])

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
