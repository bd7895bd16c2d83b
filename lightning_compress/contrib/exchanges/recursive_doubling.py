"""Sparse sums in ``log2`` of the ranks rounds.

``SSAR_Recursive_Double`` of SparCML (Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML: High-Performance
Sparse Communication for Machine Learning", SC 2019, arXiv 1802.08021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.codecs.codec import aligned
from lightning_compress.collectives import World
from lightning_compress.contrib.exchanges.rounds import HEADER, Rounds, new_messages, seal
from lightning_compress.contrib.exchanges.selection import Compact
from lightning_compress.core.random import mix
from lightning_compress.core.state import States
from lightning_compress.exchanges.exchange import Cost, Exchange, ExchangePlan
from lightning_compress.exchanges.message import MessagePlan, Section, zero_nonfinite
from lightning_compress.exchanges.sparse import coding
from lightning_compress.exchanges.sparse.split_gather import check_selective, expected_count


class Coding(Protocol):
    """How sums are written to messages; see ``coding``."""

    def most_bytes(self, numel: int, /) -> int: ...  # noqa: D102

    def write(self, values: Tensor, message: Tensor, /) -> int: ...  # noqa: D102

    def write_entries(self, indices: Tensor, values: Tensor, numel: int, message: Tensor, /) -> int: ...  # noqa: D102

    def read_entries(self, message: Tensor, numel: int, /) -> tuple[Tensor | None, Tensor]: ...  # noqa: D102


class SparseSum:
    """A running sum: ascending indices with values while it is sparse, else all numbers. SparCML's streams.

    A sum becomes dense if its two parts have half of all elements together, and stays dense. This bounds the union of
    the parts without counting it.

    Args:
        room: float32 ``[numel]``, contiguous: the first summand, and the memory of a dense sum.
        way: how the sum is written to messages.

    Attributes:
        indices: int64 ``[count]``, ascending, or None if the sum is dense.
        values: float32 ``[count]`` at the indices, or all numbers if the sum is dense.
    """

    def __init__(self, room: Tensor, way: Coding = coding) -> None:
        self._room, self._way = room, way
        self._take(coding.indices_of(room), None)

    def _take(self, indices: Tensor | None, values: Tensor | None) -> None:
        few = indices is not None and 2 * len(indices) < len(self._room)
        if few:
            self.values = self._room[indices] if values is None else values
        elif values is not None:
            self._spread(indices, values)
        self.indices = indices if few else None
        if not few:
            self.values = self._room

    def add(self, message: Tensor) -> None:
        """Add the sum in a message of another rank.

        Raises:
            ValueError: the message is damaged.
        """
        indices, values = self._entries(message)
        if self.indices is None or indices is None or 2 * (len(self.indices) + len(indices)) >= len(self._room):
            self.spread()
            self.indices, self.values = None, self._room
            self._room.add_(values) if indices is None else self._room.index_add_(0, indices, values)
        else:
            self.indices, self.values = merged(self.indices, self.values, indices, values)

    def load(self, message: Tensor) -> None:
        """Replace this sum by the sum in a message of another rank.

        Raises:
            ValueError: the message is damaged.
        """
        self._take(*self._entries(message))

    def write(self, message: Tensor) -> int:
        """Write the sum to a message; return its bytes."""
        if self.indices is None:
            return self._way.write(self._room, message)
        return self._way.write_entries(self.indices, self.values, len(self._room), message)

    def spread(self) -> None:
        """Write all numbers to ``room``, if they are not there."""
        if self.indices is not None:
            self._spread(self.indices, self.values)

    def _entries(self, message: Tensor) -> tuple[Tensor | None, Tensor]:
        indices, values = self._way.read_entries(message, len(self._room))
        coding.check_ascending(indices, len(self._room))
        return indices, values

    def _spread(self, indices: Tensor | None, values: Tensor) -> None:
        if indices is None:
            self._room.copy_(values)
        else:
            self._room.zero_().index_copy_(0, indices, values)


def merged(indices: Tensor, values: Tensor, others: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of two sparse vectors (int64 ascending indices, float32 values); zeros stay in the list."""
    at = torch.searchsorted(indices, others)
    known = torch.zeros_like(at, dtype=torch.bool)
    inside = at < len(indices)
    known[inside] = indices[at[inside]] == others[inside]
    sums = values.clone()
    sums[at[known]] += theirs[known]
    new = ~known
    slots = at[new]
    slots += torch.arange(len(slots), dtype=torch.int64, device=slots.device)
    old = torch.ones(len(indices) + len(slots), dtype=torch.bool, device=slots.device)
    old[slots] = False
    both, all_values = indices.new_empty(len(old)), values.new_empty(len(old))
    both[slots], both[old] = others[new], indices
    all_values[slots], all_values[old] = theirs[new], sums
    return both, all_values


@dataclass(frozen=True)
class RecursiveDoubling(Exchange):
    """In round i, every rank swaps sums with the rank ``2^i`` away. Sums become dense once that takes fewer bytes.

    For ``k`` of ``n`` elements, a rank sends between ``2 k log2 W`` words of four bytes, if all ranks select the same
    elements, and ``2 k (W - 1)``, if no two do. It suits few ranks, small messages and high latency. If W is not a
    power of two, the ranks beyond the next lower one send their message to another rank first, and receive the sum at
    the end. Sums are exact, and all ranks add in the same tree.
    """

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        check_selective("recursive_doubling", codec)

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        numel = sum(section.layout.numel for section in sections)

        def used(ranks: int) -> float:
            return coding.used_bytes(expected_count(sections, ranks), numel)

        return DoublingPlan("recursive_doubling", coding, used, sections, world)


@dataclass(frozen=True)
class Hop:
    """One rank's part in a round: the ranks that it sends to and receives from. ``whole``: the sum is finished."""

    to: int | None = None
    source: int | None = None
    whole: bool = False


def hops(rank: int, size: int) -> list[Hop]:
    """Return the rounds of a rank; their number is the same on all ranks."""
    core = 1 << size.bit_length() - 1
    inner = [1 << bit for bit in range(core.bit_length() - 1)]
    extra, partner = size - core, rank - core
    if rank >= core:
        return [Hop(to=partner), *(Hop() for _ in inner), Hop(source=partner, whole=True)]
    doubling = [Hop(rank ^ distance, rank ^ distance) for distance in inner]
    if rank < extra:
        return [Hop(source=rank + core), *doubling, Hop(to=rank + core, whole=True)]
    return [Hop(), *doubling, Hop(whole=True)] if extra else doubling


class DoublingPlan(ExchangePlan):
    """The rounds of recursive doubling.

    Args:
        description: name of the exchange, for the log.
        coding: how sums are written to messages.
        used: returns the expected bytes of a sum over this many ranks.
        sections: of the vectors.
        world: the ranks.
    """

    def __init__(
        self,
        description: str,
        coding: Coding,
        used: Callable[[int], float],
        sections: Sequence[Section],
        world: World,
    ) -> None:
        self.description = description
        self._coding = coding
        collective, device, meter = world
        self._collective = collective
        self._meter = meter
        self._plan = MessagePlan(sections, device, meter)
        self._compact = Compact(sections, device)
        self._hops = hops(collective.rank, collective.size)
        self._rounds = Rounds(world, 1)
        self._own = new_messages(1, self._plan.size, device)
        most = HEADER + aligned(coding.most_bytes(self._compact.numel))
        self._send, self._receive = new_messages(2, most, device)
        self.cost = Cost(
            bytes_sent=self._expected(used),
            rounds=2 * len(self._hops) + 1 if self._hops else 0,
            encodes=1.0,
            decodes=float(collective.size),
            calls=2,
        )

    def _expected(self, used: Callable[[int], float]) -> int:
        """Return the expected bytes that this rank sends, if the ranks select independently."""
        rank, size = self._collective.rank, self._collective.size
        core, members, total = 1 << size.bit_length() - 1, {rank}, 0
        for hop in self._hops:
            if hop.to is not None:
                summed = size if hop.whole else sum(1 + (each < size - core) for each in members)
                summed = summed if rank < core else 1
                total += HEADER + aligned(int(used(summed)))
            if hop.to == hop.source and hop.to is not None:
                members |= {each ^ rank ^ hop.to for each in members}
        return total + (len(self._hops) + 1) * self._rounds.table_bytes if self._hops else 0

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        """See ``ExchangePlan.average``."""
        rank, size = self._collective.rank, self._collective.size
        self._plan.agree(key, rank, size)
        self._plan.encode(vector, self._own[0], mix(key, rank), flag)
        self._plan.decode(self._own, out, 1.0, accumulate=False)
        room = self._compact.take(out).add_(0.0)  # turns -0.0, which sparse sums drop and dense ones keep, into 0.0
        with self._meter.encode:
            total = SparseSum(room, self._coding)
        self._rounds.begin()
        for number, hop in enumerate(self._hops):
            rows = self._agree(total, hop, int(flag.isnan()) if number == 0 else 0)
            if number == 0:
                flag.fill_(torch.nan if any(row[0] for row in rows) else 0.0)
            sends = {} if hop.to is None else {hop.to: self._send[: rows[rank][1]]}
            receives = {} if hop.source is None else {hop.source: self._receive[: rows[hop.source][1]]}
            use = total.load if hop.whole else total.add
            self._rounds.swap(sends, receives, lambda _, body, use=use: use(body))  # type: ignore[misc]
        if self._hops:
            self._rounds.finish()
        total.spread()
        zero_nonfinite(room.mul_(1 / size), flag)
        self._compact.put(room, out)

    def _agree(self, total: SparseSum, hop: Hop, word: int) -> list[list[int]]:
        used = 0
        if hop.to is not None:
            with self._meter.encode:
                used = seal(self._send, total.write(self._send[HEADER:]))
        return self._rounds.agree([used], len(self._send), word)
