"""Sum within a node as it is, exchange between nodes compressed.

Links within a node are ten to a hundred times as fast as those between nodes: what crosses them needs no compression,
and what has been summed before it leaves a node leaves it once. Each rank takes one part of the node's sum to the ranks
of the same index in the other nodes, so that all of a node's ranks encode, and share its network card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from lightning_compress.codecs import Codec
from lightning_compress.collectives import World
from lightning_compress.core.registry import Registry, build, lookup
from lightning_compress.core.state import States
from lightning_compress.exchanges.all_gather import AllGather
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.exchange import Exchange, ExchangePlan, Pattern, Planner, plan_of
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.nodes import Between, nodes_of
from lightning_compress.exchanges.sparse.split_gather import SplitGather
from lightning_compress.exchanges.two_shot import TwoShot

GROUP = "lightning_compress.exchanges"
"""The group of entry points by which packages offer exchanges."""
GONE = {
    "gtopk": "use 'ok_topk', by which the largest elements of the sum alone arrive as well, in bytes that do not grow "
    "with the ranks; or 'split_gather', as 'auto' does, by which all that the ranks selected arrives"
}
"""What is no exchange any more, and what to use."""
PLAIN: Registry[Pattern] = Registry(
    {
        "all_reduce": AllReduce,
        "all_gather": AllGather,
        "two_shot": TwoShot,
        "split_gather": SplitGather,
    },
    (Pattern,),
    GROUP,
    GONE,
)
"""What goes between nodes; ``planning`` adds what chooses among them."""

Inner = Literal["reduce_scatter", "chain"]
"""How a node adds up."""


def read_outer(name: str, given: object, node_size: object) -> Pattern:
    """An exchange between nodes as users write it, and of how many ranks a node is.

    Raises:
        ValueError: the exchange is unknown, knows nodes itself or keeps state; or node_size is below 1.
    """
    outer = build("exchange", given, PLAIN, (Pattern,))
    assert isinstance(outer, Pattern)
    if outer.talks or outer.keeper:
        raise ValueError(
            f"{name}(outer={outer}): between nodes goes an exchange that has no nodes of its own and keeps nothing "
            "from step to step, such as 'auto' or 'two_shot' without adagrad"
        )
    if node_size is not None and (isinstance(node_size, bool) or not isinstance(node_size, int) or node_size < 1):
        raise ValueError(f"{name}(node_size={node_size!r}): it must be a number of ranks, or null")
    return outer


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Dense reduce-scatter within a node, a compressed exchange of the parts between nodes, all-gather within a node.

    Between nodes, a rank sends what the outer exchange sends of ``1 / node_size`` of the vector: together the ranks of
    a node send as much as one rank of a world that has nodes for ranks. Within a node it sends two times
    ``(node_size - 1) / node_size`` vectors of float32. What an encoding leaves stays with the rank that encoded: the
    residual of each parameter is one rank's of the node.

    Args:
        outer: the exchange between nodes, by name, mapping or object.
        node_size: ranks of a node, which are neighbours in the order of ranks; None: those with the same host name.
        inner: "reduce_scatter": each rank leads a part of the vector; "chain": the first rank of a node leads, as by
            the exchange of that name.

    Raises:
        ValueError: the outer exchange is unknown or no fit, node_size is below 1, or inner is unknown.
    """

    outer: Pattern | dict[str, object] | str = "auto"
    node_size: int | None = None
    inner: Inner = "reduce_scatter"

    talks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        outer = read_outer("Hierarchical", self.outer, self.node_size)
        object.__setattr__(self, "outer", outer)  # frozen; equal settings are equal, however they were given
        if self.inner not in get_args(Inner):
            raise ValueError(f"Hierarchical(inner={self.inner!r}): it must be one of {', '.join(get_args(Inner))}")
        self._chain()

    def _chain(self) -> Exchange | None:
        """What plans in place of this one, with the same settings."""
        return lookup(self.inner, Pattern)(self.outer, self.node_size) if self.inner == "chain" else None

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        self._outer.check(codec)

    @property
    def _outer(self) -> Pattern:
        assert isinstance(self.outer, Pattern)
        return self.outer

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``.

        Raises:
            ValueError: nodes are of several sizes, or of one that is no fit; on every rank.
        """
        if chain := self._chain():
            return chain.plan(sections, world)
        collective, device, _ = world
        nodes = nodes_of(collective.uncounted, self.node_size, device)
        if len(nodes) == 1 or len(nodes) == collective.size:
            return plan_of(self._outer, sections, world)
        return Between(self._outer, nodes).plan(sections, world)


def replanned(pattern: Pattern, change: Callable[[Planner], Planner]) -> Pattern:
    """The same, where another planner chooses the exchange, or that between nodes."""
    if isinstance(pattern, Planner):
        return change(pattern)
    outer = getattr(pattern, "outer", None)
    return replace(pattern, outer=change(outer)) if isinstance(outer, Planner) else pattern  # type: ignore[type-var]


def measured_by(pattern: Pattern) -> dict[str, Any]:
    """What the exchange was chosen by, or that between nodes, as primitives."""
    planner = getattr(pattern, "outer", pattern)
    return planner.measured() if isinstance(planner, Planner) else {}
