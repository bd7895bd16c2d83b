"""Counters that all ranks share, and meetings of ranks that come at any time. Rank 0 keeps the counters."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import torch

from lightning_compress.collectives.collective import Collective
from lightning_compress.contrib.asynchronous.links import FIRST_KIND, Links, Message, Reply

ADD, CALL, COUNT, PING = range(FIRST_KIND, FIRST_KIND + 4)
"""Kinds of messages: two questions, the answer of both, and a question whether somebody is there, its own answer."""
POLL_S, PING_S = 0.01, 1.0
"""Seconds between two looks at a counter, and between two questions of rank 0 whether those that it waits for live."""
CALLED, MET = 0, 1
"""Counters of ranks that have come to a meeting; ``FIRST`` and above are for others."""
FIRST = 2

Name = tuple[int, int]
"""Of a counter: what it counts, below 2^15, and a number, below 2^48."""


class Board:
    """Counters of all ranks. Making it is a collective call.

    Ranks that come at any time do not meet by a collective of a process group, because its time limit would end a run
    in which one rank is slow. They count who has come, and look again until all have.

    Args:
        ranks: all of them.
        timeout: seconds in which a rank has to answer.
        device: of the tensors that ``ranks`` exchanges while the board is made.

    Attributes:
        links: with rank 0; rank 0's are with all others.
        called: number of calls so far, as this rank knows it by the last answer; see ``call``.

    Raises:
        ValueError: on every rank, if one of them cannot reach rank 0.
    """

    def __init__(self, ranks: Collective, timeout: float, device: torch.device) -> None:
        self._rank, self._size = ranks.rank, ranks.size
        self._counts: Counter[Name] = Counter()
        self._calls, self._lock = 0, threading.Lock()  # of rank 0, whose threads answer the others
        self._meetings, self.called = 0, 0
        peers = [0] if ranks.rank else [*range(1, ranks.size)]
        self.links = Links(ranks, peers, self._answer, dict.fromkeys((ADD, CALL, COUNT, PING), 0), timeout, device)

    def _answer(self, rank: int, message: Message) -> Reply:
        if message.kind == PING:
            return Reply(PING)
        name = message.clock >> 48, message.clock & (1 << 48) - 1
        return Reply(COUNT, *self._noted(message.kind, name, int(message.number)))

    def _noted(self, kind: int, name: Name, number: int) -> tuple[int, int]:
        """Count, on rank 0; return the counter, and the number of calls."""
        with self._lock:
            if kind == CALL:
                self._calls = max(self._calls, number)
            else:
                self._counts[name] += number
            return self._counts[name], self._calls

    def _tell(self, kind: int, name: Name, number: int) -> int:
        if self._rank:
            reply = self.links.ask(0, kind, name[0] << 48 | name[1], number)
            count, self.called = reply.clock, int(reply.number)
        else:
            self.links.check()
            count, self.called = self._noted(kind, name, number)
        return count

    def add(self, name: Name, by: int = 1) -> int:
        """Add to a counter, which begins at 0, and return its new value.

        Raises:
            GoneError: a rank is gone.
        """
        return self._tell(ADD, name, by)

    def call(self, number: int) -> None:
        """Call all ranks together for the ``number``-th time, from 1 on, unless another rank has done so."""
        self._tell(CALL, (CALLED, number), number)

    def meet(self, check: Callable[[], object]) -> None:
        """Wait until every rank has called this as many times as this one.

        Args:
            check: is called all the time, and may raise what ends the wait.

        Raises:
            GoneError: a rank is gone, or hangs.
        """
        self._meetings += 1
        self._wait((MET, self._meetings), check)

    def come(self, number: int, check: Callable[[], object]) -> None:
        """Wait until every rank has come to the ``number``-th call; see ``meet``."""
        self._wait((CALLED, number), check)

    def _wait(self, name: Name, check: Callable[[], object]) -> None:
        self.add(name)
        asked = time.monotonic()
        while self.add(name, 0) < self._size:
            check()
            if not self._rank and time.monotonic() - asked > PING_S:  # the others ask rank 0 all the time
                for peer in self.links.peers:
                    self.links.ask(peer, PING)
                asked = time.monotonic()
            time.sleep(POLL_S)
