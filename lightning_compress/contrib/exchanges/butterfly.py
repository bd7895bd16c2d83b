"""Nested layers of small all-to-alls that leave each rank the sums of one stretch, then all-gathers back up.

Kylix: Zhao, Canny, "Kylix: A Sparse Allreduce for Commodity Clusters", ICPP 2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.codecs.codec import aligned
from lightning_compress.collectives import World
from lightning_compress.contrib.exchanges.lists import added, joined, spread, united
from lightning_compress.contrib.exchanges.rounds import HEADER, Rounds, new_messages, seal
from lightning_compress.contrib.exchanges.selection import Compact
from lightning_compress.core.random import mix
from lightning_compress.core.state import States
from lightning_compress.exchanges.exchange import Cost, Exchange, ExchangePlan
from lightning_compress.exchanges.message import MessagePlan, Section, zero_nonfinite
from lightning_compress.exchanges.sparse import coding
from lightning_compress.exchanges.sparse.coding import SparseVector
from lightning_compress.exchanges.sparse.split_gather import check_selective, expected_count

BAD, AGAIN = 1, 2
"""Bits of a rank's first word: its gradient is not finite; it has numbers only at the indices of the last step."""
PACKET = 65536
"""Smallest message worth its latency, in bytes: half a millisecond at 1 Gbit/s."""

T = TypeVar("T")


def chosen(ranks: int, volume: Callable[[int], float]) -> tuple[int, ...]:
    """Return the degrees of the layers; their product is ``ranks``.

    Each layer gets the largest degree whose messages still have ``PACKET`` bytes. If there is none, it gets the largest
    prime factor of the remaining number.

    Args:
        ranks: number of ranks.
        volume: returns the bytes of a rank after this many ranks were merged; the same on all ranks.
    """
    degrees, left = [], ranks
    while left > 1:
        fit = [each for each in divisors(left) if volume(ranks // left) / each >= PACKET]
        degrees.append(max(fit, default=max(each for each in divisors(left) if _prime(each))))
        left //= degrees[-1]
    return tuple(sorted(degrees, reverse=True))


def check_degrees(degrees: Sequence[int], ranks: int) -> None:
    """Raise ValueError if the product of the degrees is not ``ranks``; the message lists valid degrees."""
    if math.prod(degrees) != ranks:
        fitting = "; ".join(str(each) for each in factorings(ranks)[:8])
        raise ValueError(
            f"Butterfly(degrees={tuple(degrees)}): their product is {math.prod(degrees)}, and there are {ranks} ranks; "
            f"use one of: {fitting}, or null"
        )


def divisors(number: int) -> list[int]:
    """Return the divisors above 1, ascending."""
    return [each for each in range(2, number + 1) if number % each == 0]


def factorings(number: int, most: int | None = None) -> list[tuple[int, ...]]:
    """Return all ways to write a number as a product of descending numbers above 1."""
    if number == 1:
        return [()]
    fitting = [each for each in divisors(number)[::-1] if most is None or each <= most]
    return [(first, *rest) for first in fitting for rest in factorings(number // first, first)]


def _prime(number: int) -> bool:
    return divisors(number) == [number]


class Layer(NamedTuple):
    """One layer as a rank sees it: its ranks, this rank's index, the cuts of the vector, most bytes of a message."""

    ranks: list[int]
    digit: int
    bounds: list[int]
    most: int

    @property
    def peers(self) -> list[tuple[int, int]]:
        """Indices and ranks of the other ranks in the layer."""
        return [(index, rank) for index, rank in enumerate(self.ranks) if index != self.digit]

    @property
    def own(self) -> tuple[int, int]:
        """Start and stop of the stretch that this rank keeps."""
        return self.bounds[self.digit], self.bounds[self.digit + 1]


def layers_of(rank: int, degrees: Sequence[int], numel: int) -> list[Layer]:
    """Return the layers of a rank, from the first on."""
    layers, stride, start, stop = [], 1, 0, numel
    for degree in degrees:
        digit = rank // stride % degree
        ranks = [rank + (index - digit) * stride for index in range(degree)]
        bounds = [start + (stop - start) * index // degree for index in range(degree + 1)]
        stride *= degree
        widest = -(-numel // stride)
        most = HEADER + aligned(coding.HEADER + coding.bitmap_bytes(widest) + 4 * widest)
        layers.append(Layer(ranks, digit, bounds, most))
        start, stop = layers[-1].own
    return layers


@dataclass
class Route:
    """The route of numbers through a layer: counts sent to and received from each rank, and positions in the sums."""

    cuts: list[int]
    positions: list[Tensor | None]
    counts: list[int]
    total: int
    back: list[int]


@dataclass
class Configuration:
    """Indices of this rank's numbers and of the sums, and the routes between them."""

    own: Tensor | None
    routes: list[Route]
    result: Tensor | None


class Network:
    """Sends numbers down and up through the layers.

    Args:
        layers: from the first on.
        world: the ranks.
        rounds: exchanges lengths.
    """

    def __init__(self, layers: Sequence[Layer], world: World, rounds: Rounds) -> None:
        self._layers = layers
        self._rank = world.collective.rank
        self._rounds = rounds
        self._meter = world.meter
        most = max((len(layer.ranks) * layer.most for layer in layers), default=0)
        self._send, self._receive = new_messages(2, most, world.device)

    def configure(self, held: SparseVector) -> tuple[SparseVector, Configuration]:
        """Return the sums over the ranks, and the routes. Damaged messages are reported in the next round."""
        own, routes = held.indices, []
        for layer in self._layers:
            start = layer.bounds[0]
            cuts = held.cuts([bound - start for bound in layer.bounds])
            edges = zip(pairwise(layer.bounds), pairwise(cuts), strict=True)
            parts = [held.part(a - start, b - start, first, last) for (a, b), (first, last) in edges]
            width = parts[layer.digit].numel
            parts = self._lists(layer, dict(enumerate(parts)), [width] * len(parts))
            indices, positions = united(parts)
            total = width if indices is None else len(indices)
            held = SparseVector(width, indices, added([part.values for part in parts], positions, total))
            routes.append(Route(cuts, positions, [len(part.values) for part in parts], total, []))
        for layer, route in zip(self._layers[::-1], routes[::-1], strict=True):
            parts = self._lists(layer, {layer.digit: held}, [b - a for a, b in pairwise(layer.bounds)])
            route.back = [len(part.values) for part in parts]
            held = joined(parts)
        return held, Configuration(own, routes, held.indices)

    def values_only(self, values: Tensor, known: Configuration, sound: bool) -> Tensor:
        """Return the sums of other numbers at the same indices, and check all messages; ``sound``: see ``_move``."""
        for layer, route in zip(self._layers, known.routes, strict=True):
            parts = [values[first:last] for first, last in pairwise(route.cuts)]
            got = self._floats(layer, dict(enumerate(parts)), route.counts, sound)
            values = added(got, route.positions, route.total)
        for layer, route in zip(self._layers[::-1], known.routes[::-1], strict=True):
            values = torch.cat(self._floats(layer, {layer.digit: values}, route.back, sound))
        return values

    def _lists(self, layer: Layer, parts: Mapping[int, SparseVector], widths: Sequence[int]) -> list[SparseVector]:
        """Exchange lists in a layer; return one for each of its ranks. ``widths``: lengths of their stretches."""

        def read(index: int, body: Tensor) -> SparseVector:
            return SparseVector.read(body, widths[index])

        received = self._move(layer, parts, SparseVector.write, read, None)
        nothing = torch.zeros(0, dtype=torch.float32, device=self._send.device)
        return [
            received.get(index) or SparseVector(width, nothing.long(), nothing) for index, width in enumerate(widths)
        ]

    def _floats(self, layer: Layer, parts: Mapping[int, Tensor], counts: Sequence[int], sound: bool) -> list[Tensor]:
        """Exchange numbers in a layer; return those of each of its ranks."""

        def write(values: Tensor, body: Tensor) -> int:
            body[: 4 * len(values)].view(torch.float32).copy_(values)
            return 4 * len(values)

        def read(index: int, body: Tensor) -> Tensor:
            return body[: 4 * counts[index]].view(torch.float32)

        lengths = [HEADER + aligned(4 * count) for count in counts]
        received = self._move(layer, parts, write, read, lengths, sound)
        return [
            received[index] if index in received else torch.zeros(count, dtype=torch.float32, device=self._send.device)
            for index, count in enumerate(counts)
        ]

    def _move(
        self,
        layer: Layer,
        parts: Mapping[int, T],
        write: Callable[[T, Tensor], int],
        read: Callable[[int, Tensor], T],
        lengths: Sequence[int] | None,
        sound: bool = True,
    ) -> dict[int, T]:
        """Send each rank of a layer its part, or the same part to all if there is only one.

        Args:
            layer: whose ranks exchange.
            parts: by index in the layer.
            write: writes a part into a body; returns its bytes.
            read: returns the part in a body from the rank at an index.
            lengths: of the received messages, or None if they must be exchanged.
            sound: False writes a wrong checksum, so that receivers reject the messages.

        Returns:
            this rank's and the received parts, by index, without those that could not be read.
        """
        sizes, single = [0] * len(layer.ranks), len(parts) == 1
        slots = {index: 0 if single else index for index, _ in layer.peers}
        with self._meter.encode:
            for index, slot in {0: 0}.items() if single else slots.items():
                message = self._slot(self._send, layer, slot)
                sizes[slot] = seal(message, write(parts[layer.digit if single else index], message[HEADER:]))
                message[0] ^= not sound
        rows = None if lengths else self._rounds.agree(sizes, layer.most)
        sends, receives, indices = {}, {}, {}
        for index, peer in layer.peers:
            indices[peer], theirs = index, 0 if single else layer.digit
            size = rows[self._rank][1 + slots[index]] if rows else sizes[slots[index]]
            length = rows[peer][1 + theirs] if rows else lengths[index] if lengths else 0
            sends[peer] = self._slot(self._send, layer, slots[index])[:size]
            receives[peer] = self._slot(self._receive, layer, index)[:length]
        found = {layer.digit: parts[layer.digit]}

        def keep(peer: int, body: Tensor) -> None:
            found[indices[peer]] = read(indices[peer], body)

        self._rounds.swap(sends, receives, keep)
        return found

    @staticmethod
    def _slot(buffer: Tensor, layer: Layer, slot: int) -> Tensor:
        return buffer[slot * layer.most : (slot + 1) * layer.most]


@dataclass(frozen=True)
class Butterfly(Exchange):
    """In a layer of degree d, d ranks cut their stretch in d and exchange it all-to-all; all-gathers lead back.

    The volume shrinks from layer to layer if ranks select the same elements. There are few, large messages:
    ``sum (d - 1)`` for each rank and direction. Sums are exact, so that nothing is lost. Indices are sent with the
    values, and every rank remembers the route of each number. Values are sent without indices as long as every rank has
    numbers only at indices of the last step with indices (a constant mask, or nearly all elements), and at half of them
    or more. All ranks decide this together.

    Args:
        degrees: of the layers; the first layer joins consecutive ranks. The product is the number of ranks, and degrees
            should descend. None: the largest whose messages are worth their latency, else prime factors.

    Raises:
        ValueError: a degree is not an integer above 1, or (from ``plan``) the product is not the number of ranks.
    """

    degrees: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.degrees is None:
            return
        given = self.degrees
        try:
            degrees = tuple(given)
        except TypeError:
            degrees = (0,)
        if not all(isinstance(each, int) and not isinstance(each, bool) and each > 1 for each in degrees):
            raise ValueError(
                f"Butterfly(degrees={given!r}): give integers above 1, such as (4, 2) for 8 ranks, or null"
            )
        object.__setattr__(self, "degrees", degrees)  # frozen; equal settings are equal, however they were given

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        check_selective("butterfly", codec)

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``.

        Raises:
            ValueError: the product of the degrees is not the number of ranks; on every rank.
        """
        numel = sum(section.layout.numel for section in sections)

        def volume(merged: int) -> float:
            return coding.used_bytes(expected_count(sections, merged) / merged, -(-numel // merged))

        degrees = chosen(world.collective.size, volume) if self.degrees is None else self.degrees
        check_degrees(degrees, world.collective.size)
        return _Plan(sections, degrees, world)


class _Plan(ExchangePlan):
    def __init__(self, sections: Sequence[Section], degrees: Sequence[int], world: World) -> None:
        self.description = f"butterfly of {' x '.join(map(str, degrees)) or '1'}"
        collective, device, meter = world
        self._collective = collective
        self._meter = meter
        self._plan = MessagePlan(sections, device, meter)
        self._compact = Compact(sections, device)
        self._layers = layers_of(collective.rank, degrees, self._compact.numel)
        self._rounds = Rounds(world, max(degrees, default=1))
        self._network = Network(self._layers, world, self._rounds)
        self._own = new_messages(1, self._plan.size, device)
        self._known: Configuration | None = None
        self.cost = Cost(
            bytes_sent=self._expected(sections),
            rounds=4 * len(degrees) + 2 if degrees else 0,
            encodes=1.0,
            decodes=1.0 + sum(degree - 1 for degree in degrees),
            calls=2,
        )

    def _expected(self, sections: Sequence[Section]) -> int:
        """Return the bytes of a step with indices, if the ranks select independently."""
        merged, total, size = 1, 0, self._collective.size
        for layer in self._layers:
            bounds = list(pairwise(layer.bounds))
            for index, _ in layer.peers:
                total += _message_bytes(sections, merged, *bounds[index]) + _message_bytes(sections, size, *layer.own)
            merged *= len(layer.ranks)
        return total + (2 * len(self._layers) + 2) * self._rounds.table_bytes if self._layers else 0

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        self._plan.share(key)
        self._plan.encode(vector, self._own[0], mix(key, rank), flag)
        self._plan.decode(self._own, out, 1.0, accumulate=False)
        room = self._compact.take(out)
        if self._layers:
            self._sum(room, flag)
        zero_nonfinite(room.mul_(1 / size), flag)
        self._compact.put(room, out)

    def _sum(self, room: Tensor, flag: Tensor) -> None:
        known, self._known = self._known, None  # after an error no rank has it
        with self._meter.encode:
            held = SparseVector.of(room)
            again = known is not None and _covered(room, held, known.own)
        self._rounds.begin()
        rows = self._rounds.agree([], 0, BAD * int(flag.isnan()) + AGAIN * again)
        flag.fill_(torch.nan if any(row[0] & BAD for row in rows) else 0.0)
        if known is not None and all(row[0] & AGAIN for row in rows):
            values = self._network.values_only(SparseVector.at(known.own, room).values, known, sound=again)
            result = SparseVector(len(room), known.result, values)
        else:
            result, known = self._network.configure(held)
        self._rounds.finish()
        spread(result, room)
        self._known = known


def _message_bytes(sections: Sequence[Section], merged: int, start: int, stop: int) -> int:
    inside, end = [], 0
    for section in sections:
        first, end = end, end + section.layout.numel
        if max(start, first) < min(stop, end):
            cut = section.layout.cut(max(start, first) - first, min(stop, end) - first)
            inside.append(replace(section, layout=cut))
    count = expected_count(inside, merged)
    return HEADER + aligned(int(coding.used_bytes(count, stop - start, exact=True)))


def _covered(room: Tensor, held: SparseVector, known: Tensor | None) -> bool:
    """Return whether numbers are at known indices only, and enough of them to send values without indices."""
    count = len(held.values)
    if known is None:
        return 2 * count >= len(room)
    return 2 * count >= len(known) and int(room[known].count_nonzero()) == count
