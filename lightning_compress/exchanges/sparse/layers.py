"""Layers of a butterfly: who is in them, and the ways of numbers through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_compress.codecs.base import aligned
from lightning_compress.collectives import World
from lightning_compress.exchanges.base import new_messages
from lightning_compress.exchanges.sparse import coding
from lightning_compress.exchanges.sparse.lists import Listed, added, joined, united
from lightning_compress.exchanges.sparse.rounds import HEADER, Rounds, seal

T = TypeVar("T")


class Layer(NamedTuple):
    """One layer as a rank sees it: the ranks, its place among them, the stretch and how it is cut, capacities."""

    ranks: list[int]
    digit: int
    bounds: list[int]
    most: int

    @property
    def peers(self) -> list[tuple[int, int]]:
        """Places and ranks of the others."""
        return [(place, rank) for place, rank in enumerate(self.ranks) if place != self.digit]

    @property
    def own(self) -> tuple[int, int]:
        """The stretch that this rank goes on with."""
        return self.bounds[self.digit], self.bounds[self.digit + 1]


def layers_of(rank: int, degrees: Sequence[int], numel: int) -> list[Layer]:
    """The layers from the first on."""
    layers, stride, start, stop = [], 1, 0, numel
    for degree in degrees:
        digit = rank // stride % degree
        ranks = [rank + (place - digit) * stride for place in range(degree)]
        bounds = [start + (stop - start) * place // degree for place in range(degree + 1)]
        stride *= degree
        widest = -(-numel // stride)
        most = HEADER + aligned(coding.HEADER + coding.bitmap_bytes(widest) + 4 * widest)
        layers.append(Layer(ranks, digit, bounds, most))
        start, stop = layers[-1].own
    return layers


@dataclass
class Route:
    """The way of numbers through a layer: how many go to and come from each rank, and what they are added to."""

    cuts: list[int]
    positions: list[Tensor | None]
    counts: list[int]
    total: int
    back: list[int]


@dataclass
class Configuration:
    """Places of this rank's numbers and of the sum's, and the ways between."""

    own: Tensor | None
    routes: list[Route]
    result: Tensor | None


class Network:
    """What travels through the layers, down and up again.

    Args:
        layers: from the first on.
        world: the ranks.
        rounds: in which lengths are told.
    """

    def __init__(self, layers: Sequence[Layer], world: World, rounds: Rounds) -> None:
        self._layers = layers
        self._rank = world.collective.rank
        self._rounds = rounds
        self._meter = world.meter
        most = max((len(layer.ranks) * layer.most for layer in layers), default=0)
        self._send, self._receive = new_messages(2, most, world.device)

    def configure(self, held: Listed) -> tuple[Listed, Configuration]:
        """Add up over the ranks, and remember the ways; what is wrong with a message is told in the next round."""
        own, routes = held.places, []
        for layer in self._layers:
            start = layer.bounds[0]
            cuts = held.cuts([bound - start for bound in layer.bounds])
            edges = zip(pairwise(layer.bounds), pairwise(cuts), strict=True)
            parts = [held.part(a - start, b - start, first, last) for (a, b), (first, last) in edges]
            width = parts[layer.digit].numel
            parts = self._lists(layer, dict(enumerate(parts)), [width] * len(parts))
            places, positions = united(parts)
            total = width if places is None else len(places)
            held = Listed(width, places, added([part.values for part in parts], positions, total))
            routes.append(Route(cuts, positions, [len(part.values) for part in parts], total, []))
        for layer, route in zip(self._layers[::-1], routes[::-1], strict=True):
            parts = self._lists(layer, {layer.digit: held}, [b - a for a, b in pairwise(layer.bounds)])
            route.back = [len(part.values) for part in parts]
            held = joined(parts)
        return held, Configuration(own, routes, held.places)

    def values_only(self, values: Tensor, known: Configuration, sound: bool) -> Tensor:
        """The same for other numbers at the places of the configuration; nobody believes what is not sound."""
        for layer, route in zip(self._layers, known.routes, strict=True):
            parts = [values[first:last] for first, last in pairwise(route.cuts)]
            got = self._floats(layer, dict(enumerate(parts)), route.counts, sound)
            values = added(got, route.positions, route.total)
        for layer, route in zip(self._layers[::-1], known.routes[::-1], strict=True):
            values = torch.cat(self._floats(layer, {layer.digit: values}, route.back, sound))
        return values

    def _lists(self, layer: Layer, parts: Mapping[int, Listed], widths: Sequence[int]) -> list[Listed]:
        """Lists of every rank of a layer, this one's included; ``widths``: of the stretches that they are of."""

        def read(place: int, body: Tensor) -> Listed:
            return Listed.read(body, widths[place])

        found = self._move(layer, parts, Listed.write, read, None)
        nothing = torch.zeros(0, device=self._send.device)
        return [found.get(place) or Listed(width, nothing.long(), nothing) for place, width in enumerate(widths)]

    def _floats(self, layer: Layer, parts: Mapping[int, Tensor], counts: Sequence[int], sound: bool) -> list[Tensor]:
        """Numbers of every rank of a layer, this one's included."""

        def write(values: Tensor, body: Tensor) -> int:
            body[: 4 * len(values)].view(torch.float32).copy_(values)
            return 4 * len(values)

        def read(place: int, body: Tensor) -> Tensor:
            return body[: 4 * counts[place]].view(torch.float32)

        lengths = [HEADER + aligned(4 * count) for count in counts]
        found = self._move(layer, parts, write, read, lengths, sound)
        return [
            found[place] if place in found else torch.zeros(count, device=self._send.device)
            for place, count in enumerate(counts)
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
        """Send each rank of a layer its part, or all of them the only one.

        Args:
            layer: whose ranks.
            parts: by places in the layer.
            write: a part into a body; returns bytes.
            read: a body of the rank at a place.
            lengths: of the messages that come, if they are known.
            sound: whether the messages may be believed.

        Returns:
            what came, by place, and the own part; without what could not be read.
        """
        sizes, one = [0] * len(layer.ranks), len(parts) == 1
        slots = {place: 0 if one else place for place, _ in layer.peers}
        with self._meter.span("encode"):
            for place, slot in {0: 0}.items() if one else slots.items():
                message = self._slot(self._send, layer, slot)
                sizes[slot] = seal(message, write(parts[layer.digit if one else place], message[HEADER:]))
                message[0] ^= not sound
        rows = None if lengths else self._rounds.agree(sizes, layer.most)
        sends, receives, places = {}, {}, {}
        for place, peer in layer.peers:
            places[peer], theirs = place, 0 if one else layer.digit
            size = rows[self._rank][1 + slots[place]] if rows else sizes[slots[place]]
            length = rows[peer][1 + theirs] if rows else lengths[place] if lengths else 0
            sends[peer] = self._slot(self._send, layer, slots[place])[:size]
            receives[peer] = self._slot(self._receive, layer, place)[:length]
        found = {layer.digit: parts[layer.digit]}

        def keep(peer: int, body: Tensor) -> None:
            found[places[peer]] = read(places[peer], body)

        self._rounds.swap(sends, receives, keep)
        return found

    @staticmethod
    def _slot(buffer: Tensor, layer: Layer, slot: int) -> Tensor:
        return buffer[slot * layer.most : (slot + 1) * layer.most]
