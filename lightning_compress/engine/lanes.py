"""Lanes in which neighbouring buckets are averaged: one computes while the messages of the other travel.

Each lane has a transport and scratch memory of its own. Gloo matches collectives by their order, so that a lane's
groups are averaged one after the other, in the order of the buckets on every rank. Between lanes no order is needed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_compress.collectives import Collective, CountingCollective, OrderedCollective, World
from lightning_compress.collectives.collective import Operation, Overlapping, Wait
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.workspace import Workspace, use


class Turn:
    """What the thread holds that computes, as a context, and gives to another thread while it waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        self._take()

    def __exit__(self, *_: object) -> None:
        self._give()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Give the turn to others inside the context, if this thread holds it."""
        if self._holder != threading.get_ident():
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def _give(self) -> None:
        self._holder = None
        self._lock.release()


class TurnCollective(Collective):
    """A collective during which other threads have the turn.

    Args:
        inner: the transport.
        turn: to compute.
    """

    def __init__(self, inner: Collective, turn: Turn) -> None:
        self._inner, self._turn = inner, turn
        self.rank, self.size = inner.rank, inner.size

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """See ``Collective``."""
        with self._turn.given():
            self._inner.all_reduce(tensor, operation)

    def begin(self, name: Overlapping, *arguments: Any) -> Wait:
        """See ``Collective``."""
        with self._turn.given():  # it may do all of its work already
            wait = self._inner.begin(name, *arguments)
        return lambda: self._wait(wait)

    def _wait(self, wait: Wait) -> None:
        with self._turn.given():
            wait()

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """See ``Collective``."""
        with self._turn.given():
            self._inner.all_gather(tensor, out)

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """See ``Collective``."""
        with self._turn.given():
            self._inner.all_to_all(send, receive)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """See ``Collective``."""
        with self._turn.given():
            self._inner.swap(sends, receives)

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """See ``Collective``."""
        with self._turn.given():
            return TurnCollective(self._inner.part(ranks), self._turn)


@dataclass
class Lane:
    """What one group at a time uses to be averaged: a context, in which its workspace is this thread's.

    Attributes:
        world: the ranks, over a transport of the lane's own.
        turn: given to others while a thread waits for the lane.
        workspace: the scratch memory of the plans of its groups.
        free: held while a group is averaged.
    """

    world: World
    turn: Turn
    workspace: Workspace = field(default_factory=Workspace)
    free: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> None:
        if not self.free.acquire(blocking=False):
            with self.turn.given():
                self.free.acquire()
        self._before = use(self.workspace)

    def __exit__(self, *_: object) -> None:
        use(self._before)
        self.free.release()


class Lanes:
    """All lanes of a model.

    Args:
        transports: the same ranks over a transport for each lane.
        meter: counts what all of them send.
        ordered: add floating-point numbers in rank order.

    Attributes:
        all: the lanes.
        turn: what the thread holds that computes.
    """

    def __init__(self, transports: Sequence[Collective], meter: Meter, ordered: bool) -> None:
        self.turn = Turn()
        if ordered:
            transports = [OrderedCollective(each) for each in transports]
        if len(transports) > 1:
            transports = [TurnCollective(each, self.turn) for each in transports]
        worlds = [World(CountingCollective(each, meter), meter.device, meter) for each in transports]
        self.all = [Lane(world, self.turn) for world in worlds]
        self._turns = itertools.cycle(self.all)

    def next(self) -> Lane:
        """Return the lane of a new group: each in turn, so that neighbours have different ones."""
        return next(self._turns)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have all lanes for oneself inside the context; while waiting for them, others have the turn."""
        with ExitStack() as stack:
            for lane in self.all:
                stack.enter_context(lane)
            yield

    def clear(self) -> None:
        """Free the scratch memory."""
        for lane in self.all:
            lane.workspace.release()
