"""Threads that send in the background, one for each neighbour."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lightning_compress.contrib.asynchronous.links import Links


class Senders:
    """Send messages to all neighbours, each in the order in which they were given, and wait for their answers.

    A neighbour behind a slow link holds up its own messages alone. Answers say nothing but that a message was taken.

    Args:
        links: with the neighbours; nobody else asks over them.

    Attributes:
        error: of a message that could not be sent, or None; nothing more is sent to that neighbour.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._changed, self._ended = threading.Condition(), False
        self._messages: dict[int, deque[tuple[int, int, Sequence[Tensor]]]] = {peer: deque() for peer in links.peers}
        self.error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(peer,), name=f"lightning_compress sends to {peer}", daemon=True)
            for peer in links.peers
        ]
        for each in self._threads:
            each.start()

    def send(self, kind: int, clock: int = 0, parts: Sequence[Tensor] = ()) -> None:
        """Send a message to all neighbours; see ``Connection.send``. The parts must not change any more."""
        with self._changed:
            for waiting in self._messages.values():
                waiting.append((kind, clock, parts))
            self._changed.notify_all()

    def ping(self, kind: int, peers: Collection[int]) -> None:
        """Send an empty message to those of these neighbours of whom no answer is awaited."""
        with self._changed:
            for peer in peers:
                if not self._messages[peer]:
                    self._messages[peer].append((kind, 0, ()))
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads when all that was given to them is answered, or a neighbour is gone; waits for that."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for each in self._threads:
            each.join()

    def _run(self, peer: int) -> None:
        waiting = self._messages[peer]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: waiting or self._ended)
                if not waiting:
                    return
                kind, clock, parts = waiting[0]  # stays there until it is answered
            try:
                with torch.no_grad():
                    self._links.ask(peer, kind, clock, parts=parts)
            except BaseException as error:
                self.error = error
                return
            with self._changed:
                waiting.popleft()
