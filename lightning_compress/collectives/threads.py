"""Ranks as threads of one process: the same exchanges without sockets, for tests and simulations."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from lightning_compress.collectives.collective import Collective, Operation

T = TypeVar("T")


_PATIENCE = 0.5
"""Seconds that a rank waits for its turn before it runs beside the others, which may be waiting for it elsewhere."""


class _Turn:
    """Have ranks run one after another: threads that compete for the interpreter spend most of their time on switches.

    Threads that a rank starts itself run at any time.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self._lock = threading.Lock()
        self._holder: int | None = None

    def take(self) -> None:
        if threading.get_ident() in self.ranks and self._lock.acquire(timeout=_PATIENCE):
            self._holder = threading.get_ident()

    def leave(self) -> None:
        if self._holder == threading.get_ident():
            self._holder = None
            self._lock.release()


class _World:
    def __init__(self, size: int, timeout: float, turn: _Turn) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.turn = turn
        self.slots: list[Tensor | None] = [None] * size
        self.letters: list[Mapping[int, Tensor]] = [{}] * size
        self.timeout = timeout
        self.parts: dict[tuple[int, ...], _World] = {}
        self.lock = threading.Lock()

    def part(self, ranks: tuple[int, ...], number: int = 0) -> _World:
        with self.lock:
            return self.parts.setdefault((number, *ranks), _World(len(ranks), self.timeout, self.turn))

    def wait(self) -> None:
        """Wait for the other ranks."""
        self.turn.leave()
        self.barrier.wait()
        self.turn.take()

    def abort(self) -> None:
        self.barrier.abort()
        for part in self.parts.values():
            part.abort()


class ThreadCollective(Collective):
    """One thread's view of a world of threads; if a rank misses a call, the barrier breaks for all."""

    def __init__(self, world: _World, rank: int, size: int) -> None:
        self._world = world
        self.rank = rank
        self.size = size
        self._worlds = 0

    def _share(self, tensor: Tensor, use: Callable[[list[Tensor]], T]) -> T:
        self._world.slots[self.rank] = tensor
        self._world.wait()
        result = use([slot for slot in self._world.slots if slot is not None])
        self._world.wait()
        return result

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Sum or maximise in rank order."""
        combine = torch.add if operation == "sum" else torch.maximum
        tensor.copy_(self._share(tensor, lambda slots: functools.reduce(combine, slots)))

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Stack the tensors of all ranks."""
        self._share(tensor, lambda slots: out.copy_(torch.stack(slots)))

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """Copy this rank's row of every rank."""
        self._share(send, lambda slots: receive.copy_(torch.stack([slot[self.rank] for slot in slots])))

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Copy what the other ranks left for this rank."""
        letters = self._world.letters
        letters[self.rank] = sends
        self._world.wait()
        for peer, tensor in receives.items():
            letter = letters[peer][self.rank]
            if letter.shape != tensor.shape:  # copy_ would broadcast it
                raise RuntimeError(f"rank {peer} sends {tuple(letter.shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(letter)
        self._world.wait()

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """Return a world inside the world."""
        members = next(tuple(part) for part in ranks if self.rank in part)
        return ThreadCollective(self._world.part(members), members.index(self.rank), len(members))

    def apart(self) -> Collective:
        """Return another world of the same threads at each call."""
        self._worlds += 1
        return ThreadCollective(self._world.part(tuple(range(self.size)), self._worlds), self.rank, self.size)


def run_threads(size: int, function: Callable[[Collective], T], timeout: float = 60.0) -> list[T]:
    """Run ``function(collective)`` on ``size`` thread ranks and return their results in rank order.

    Args:
        size: number of ranks, at least 1.
        function: the program of one rank.
        timeout: seconds that a rank waits for the others in a collective before it raises ``BrokenBarrierError``.
    """
    turn = _Turn()
    world, problems = _World(size, timeout, turn), list[BaseException]()

    def program(rank: int) -> T:
        turn.ranks.add(threading.get_ident())
        turn.take()
        try:
            return function(ThreadCollective(world, rank, size))
        except BaseException as error:
            problems.append(error)  # before the barrier breaks for others
            world.abort()
            raise
        finally:
            turn.leave()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(program, rank) for rank in range(size)]
    if problems:
        raise problems[0]
    return [future.result() for future in futures]
