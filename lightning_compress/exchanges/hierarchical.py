"""Sum within a node as it is, exchange between nodes compressed.

Links within a node are ten to a hundred times as fast as those between nodes: what crosses them needs no compression,
and what has been summed before it leaves a node leaves it once. Each rank takes one part of the node's sum to the ranks
of the same place in the other nodes, so that all of a node's ranks encode, and share its network card. Or its
first rank leads a node, as in S-Caffe (Awan, Hamidouche, Hashmi, Panda, PPoPP 2017): then nodes may differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.collectives import Collective, World
from lightning_compress.collectives.counting import all_gather_rounds, all_to_all_rounds
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.core.registry import build
from lightning_compress.core.state import States
from lightning_compress.exchanges.all_gather import AllGather
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.auto import Auto
from lightning_compress.exchanges.base import Exchange, ExchangePlan, gather, scatter
from lightning_compress.exchanges.binomial import Binomial
from lightning_compress.exchanges.chain import LeadersPlan, agreed
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.nodes import nodes_of
from lightning_compress.exchanges.sparse.butterfly import Butterfly
from lightning_compress.exchanges.sparse.gtopk import GTopK
from lightning_compress.exchanges.sparse.recursive_doubling import RecursiveDoubling
from lightning_compress.exchanges.sparse.run_length import RunLength
from lightning_compress.exchanges.sparse.split_gather import SplitGather
from lightning_compress.exchanges.two_shot import TwoShot

PLAIN: dict[str, type[Exchange]] = {
    "auto": Auto,
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "two_shot": TwoShot,
    "split_gather": SplitGather,
    "recursive_doubling": RecursiveDoubling,
    "butterfly": Butterfly,
    "gtopk": GTopK,
    "run_length": RunLength,
    "binomial": Binomial,
}
"""What goes between nodes."""

Inner = Literal["reduce_scatter", "chain"]
"""How a node adds up."""


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Dense reduce-scatter within a node, a compressed exchange of the parts between nodes, all-gather within a node.

    Between nodes, a rank sends what the outer exchange sends of ``1 / node_size`` of the vector: together the ranks of
    a node send as much as one rank of a world that has nodes for ranks. Within a node it sends two times
    ``(node_size - 1) / node_size`` vectors of float32. What an encoding leaves stays with the rank that encoded: the
    residual of each parameter is one rank's of the node.

    With ``inner="chain"`` sums go from rank to rank of a node in chunks, a vector of float32 from each, to the first
    one, which encodes and sends all of it while the others wait; the mean comes back by way of all. No rank is sent two
    messages at once, and nodes may differ in size. S-Caffe's reduction is ``Hierarchical("binomial", inner="chain")``.

    Args:
        outer: the exchange between nodes, by name, mapping or object.
        node_size: ranks of a node, which are neighbours in the order of ranks; None: those with the same host name.
        inner: "reduce_scatter": each rank leads a part of the vector; "chain": the first rank leads.

    Raises:
        ValueError: the outer exchange is unknown or no fit, node_size is below 1, or inner is unknown.
    """

    outer: Exchange | dict[str, object] | str = "auto"
    node_size: int | None = None
    inner: Inner = "reduce_scatter"

    talks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        outer = build("exchange", self.outer, PLAIN, (Exchange,))
        assert isinstance(outer, Exchange)
        if isinstance(outer, Hierarchical) or outer.state(Layout(())):
            raise ValueError(f"Hierarchical(outer={outer}): it must be one of {', '.join(PLAIN)}, without adagrad")
        object.__setattr__(self, "outer", outer)  # frozen; equal settings are equal, however they were given
        size = self.node_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"Hierarchical(node_size={size!r}): it must be a number of ranks, or null")
        if self.inner not in get_args(Inner):
            raise ValueError(f"Hierarchical(inner={self.inner!r}): it must be one of {', '.join(get_args(Inner))}")
        if self.inner == "chain" and isinstance(outer, Auto):  # which all ranks have to measure, and choose
            raise ValueError(
                "Hierarchical(inner='chain', outer='auto'): the first rank of a node alone talks to others, and cannot "
                "choose for all; name the exchange between nodes, such as outer='binomial'"
            )

    def fixed(self) -> Exchange:
        """See ``Exchange.fixed``."""
        return replace(self, outer=self._outer.fixed())

    def measured(self) -> dict[str, Any]:
        """See ``Exchange.measured``."""
        return self._outer.measured()

    def given(self, measured: Mapping[str, Any]) -> Exchange:
        """See ``Exchange.given``."""
        return replace(self, outer=self._outer.given(measured))

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        self._outer.check(codec)

    @property
    def _outer(self) -> Exchange:
        assert isinstance(self.outer, Exchange)
        return self.outer

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``.

        Raises:
            ValueError: nodes are of several sizes and there is no chain, or it is no fit; on every rank.
        """
        chain, (collective, device, _) = self.inner == "chain", world
        nodes = nodes_of(collective.uncounted, self.node_size, device, one_size=not chain)
        if len(nodes) == 1 or len(nodes) == collective.size:
            return self._outer.plan(sections, world)
        inside = collective.part(nodes)
        if chain:
            leading = collective.part([[node[0] for node in nodes], [rank for node in nodes for rank in node[1:]]])
            led = None if inside.rank else lambda: self._outer.plan(_moved(sections), world.among(leading))
            outer = agreed(led, collective.uncounted, device)
            return LeadersPlan(sections, outer, inside, len(nodes) / collective.size, device)
        between = collective.part(list(zip(*nodes, strict=True)))
        parts = [[section.shard(place, inside.size) for section in sections] for place in range(inside.size)]
        self._outer.measure([section.codec for section in sections], between, collective, device)
        outer = self._outer.plan(_moved(parts[inside.rank]), world.among(between))
        return _Plan(parts, outer, inside, device)


def _moved(sections: Sequence[Section]) -> list[Section]:
    """The same in a vector that has nothing else."""
    moved, start = [], 0
    for section in sections:
        moved.append(Section(section.codec, section.layout, start))
        start += section.layout.numel
    return moved


class _Plan(ExchangePlan):
    def __init__(
        self, parts: list[list[Section]], outer: ExchangePlan, inside: Collective, device: torch.device
    ) -> None:
        self._places = [[slice(each.start, each.stop) for each in part] for part in parts]
        self._numels = [sum(each.layout.numel for each in part) for part in parts]
        self._outer = outer
        self._inside = inside
        width = max(self._numels) + 1  # with the flag
        self._width, self._device = width, device
        self.description = f"{outer.description} between nodes of {inside.size}"
        self.inner_bytes = 2 * (inside.size - 1) * 4 * width
        self.inner_rounds = all_to_all_rounds(inside.size) + all_gather_rounds(inside.size)
        self.bytes_sent = self.inner_bytes + outer.bytes_sent
        self.rounds = self.inner_rounds + outer.rounds
        self.waited_bytes = outer.waited_bytes
        self.copies, self.calls = 4.0, outer.calls  # into rows, their sum, what is left, out of rows
        self.encodes, self.decodes = outer.encodes / inside.size, outer.decodes / inside.size
        self.sum_encodes, self.sum_decodes = outer.sum_encodes / inside.size, outer.sum_decodes / inside.size
        self.sum_ranks = outer.sum_ranks

    @cached_property
    def _rows(self) -> Tensor:
        return torch.zeros(self._inside.size, self._width, device=self._device)

    @cached_property
    def _received(self) -> Tensor:
        return torch.empty_like(self._rows)

    @cached_property
    def _mean(self) -> Tensor:
        return torch.empty(self._width, device=self._device)

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._inside.rank, self._inside.size
        rows, received = self._rows, self._received
        for row, places in zip(rows, self._places, strict=True):
            gather(vector, places, row)
            row[-1] = flag
            for place in places:  # what else there is others take care of
                vector[place] = 0.0
        self._inside.all_to_all(rows, received)
        total = received[0]
        for row in received[1:]:
            total.add_(row)
        flag.copy_(total[-1])
        numel = self._numels[rank]
        own, mean = total[:numel], self._mean[:numel]
        self._outer.mean(own, mean, mix(key, rank), flag)
        scatter(own, self._places[rank], vector)
        torch.mul(mean, 1 / size, out=mean)
        self._mean[-1] = flag
        self._inside.all_gather(self._mean, rows)
        for row, places in zip(rows, self._places, strict=True):
            scatter(row, places, out)
            flag.add_(row[-1])
