"""Transports during whose messages other threads compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_compress.collectives.collective import Collective, Operation, Overlapping, Wait


@contextmanager
def given(turn: threading.RLock) -> Iterator[None]:
    """Give the turn to other threads inside the context, if this one holds it."""
    try:
        turn.release()
    except RuntimeError:  # it does not
        held = False
    else:
        held = True
    try:
        yield
    finally:
        if held:
            turn.acquire()


class TurnCollective(Collective):
    """A collective during which other threads have the turn.

    Args:
        inner: the transport.
        turn: what the thread holds that computes, and gives to another thread while it waits.
    """

    def __init__(self, inner: Collective, turn: threading.RLock) -> None:
        self._inner, self._turn = inner, turn
        self.rank, self.size = inner.rank, inner.size

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """See ``Collective``."""
        with given(self._turn):
            self._inner.all_reduce(tensor, operation)

    def begin(self, name: Overlapping, *arguments: Any) -> Wait:
        """See ``Collective``."""
        with given(self._turn):  # it may do all of its work already
            wait = self._inner.begin(name, *arguments)
        return lambda: self._wait(wait)

    def _wait(self, wait: Wait) -> None:
        with given(self._turn):
            wait()

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """See ``Collective``."""
        with given(self._turn):
            self._inner.all_gather(tensor, out)

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """See ``Collective``."""
        with given(self._turn):
            self._inner.all_to_all(send, receive)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """See ``Collective``."""
        with given(self._turn):
            self._inner.swap(sends, receives)

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """See ``Collective``."""
        with given(self._turn):
            return TurnCollective(self._inner.part(ranks), self._turn)
