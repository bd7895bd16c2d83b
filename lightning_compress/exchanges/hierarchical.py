"""Sum within a node as it is, exchange between nodes compressed.

Links within a node are ten to a hundred times as fast as those between nodes: what crosses them needs no compression,
and what has been summed before it leaves a node leaves it once. Each rank takes one part of the node's sum to the ranks
of the same index in the other nodes, so that all of a node's ranks encode, and share its network card. Or its
first rank leads a node, as in S-Caffe (Awan, Hamidouche, Hashmi, Panda, PPoPP 2017): then nodes may differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from lightning_compress.codecs import Codec
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout
from lightning_compress.core.registry import build
from lightning_compress.core.state import States
from lightning_compress.exchanges.all_gather import AllGather
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.auto import Auto
from lightning_compress.exchanges.base import Exchange, ExchangePlan
from lightning_compress.exchanges.binomial import Binomial
from lightning_compress.exchanges.chain import LeadersPlan, agreed
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.nodes import nodes_of, plan_parts, side_by_side
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
        if not chain:
            return plan_parts(self._outer, nodes, sections, world)
        inside = collective.part(nodes)
        leading = collective.part([[node[0] for node in nodes], [rank for node in nodes for rank in node[1:]]])
        led = None if inside.rank else lambda: self._outer.plan(side_by_side(sections), world.among(leading))
        outer = agreed(led, collective.uncounted, device)
        return LeadersPlan(sections, outer, inside, len(nodes) / collective.size, device)
