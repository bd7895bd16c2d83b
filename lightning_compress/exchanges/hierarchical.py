"""Sum dense gradients within a node, exchange compressed messages between nodes.

Links within a node are 10 to 100 times faster than links between nodes. So gradients need no compression within a node,
and each node's sum leaves it once. Each rank takes one part of the sum to the ranks with the same index in the other
nodes: all ranks of a node encode, and share its network card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lightning_compress.codecs import Codec
from lightning_compress.collectives import World
from lightning_compress.core.registry import Registry, build
from lightning_compress.core.state import States
from lightning_compress.exchanges.all_gather import AllGather
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.exchange import Exchange, ExchangePlan, Pattern, Planner
from lightning_compress.exchanges.message import Section
from lightning_compress.exchanges.nodes import Between, check_node_size, nodes_of
from lightning_compress.exchanges.sparse.split_gather import SplitGather
from lightning_compress.exchanges.two_shot import TwoShot

GROUP = "lightning_compress.exchanges"
"""The entry-point group through which packages offer exchanges."""
GONE = {
    "gtopk": "use 'ok_topk', which also sends only the largest elements of the sum, in bytes that do not grow with the "
    "ranks; or 'split_gather', as 'auto' does, which sends all elements that any rank selected"
}
"""Removed exchanges, with what to use instead."""
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
"""Exchanges that can run between nodes. ``planning`` adds the planner that chooses among them."""


def read_outer(name: str, given: object, node_size: object) -> Pattern:
    """Return the exchange between nodes, built from what the user wrote.

    Args:
        name: the class's name, for messages.
        given: a name, mapping or object.
        node_size: ranks per node; only checked.

    Raises:
        ValueError: the exchange is unknown, uses nodes itself or keeps state; or node_size is below 1.
    """
    outer = build("exchange", given, PLAIN, (Pattern,))
    assert isinstance(outer, Pattern)
    if outer.plans_collectively or outer.keeper:
        raise ValueError(
            f"{name}(outer={outer}): the exchange between nodes must not use nodes itself or keep state between "
            "steps; use 'auto', or 'two_shot' without adagrad"
        )
    check_node_size(name, node_size)
    return outer


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Dense reduce-scatter within a node, compressed exchange of the parts between nodes, all-gather within a node.

    Between nodes, a rank sends what the outer exchange sends for ``1 / node_size`` of the vector. Together, the ranks
    of a node send as much as one rank would in a world of one rank per node. Within a node, a rank sends ``2 (node_size
    - 1) / node_size`` vectors of float32. The residual stays with the rank that encoded, so each parameter's residual
    is on one rank of the node.

    Args:
        outer: the exchange between nodes, by name, mapping or object.
        node_size: ranks per node, consecutive in rank order; None: ranks with the same host name form a node.

    Raises:
        ValueError: the outer exchange is unknown or unsuitable, or node_size is below 1.
    """

    outer: Pattern | dict[str, object] | str = "auto"
    node_size: int | None = None

    plans_collectively: ClassVar[bool] = True
    gone: ClassVar[Mapping[str, str]] = {
        "inner": "leave it out for 'reduce_scatter'; for 'chain' use exchange={'name': 'chain', 'outer': 'binomial'}"
    }

    def __post_init__(self) -> None:
        outer = read_outer("Hierarchical", self.outer, self.node_size)
        object.__setattr__(self, "outer", outer)  # frozen; equal settings are equal, however they were given

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
            ValueError: nodes differ in size, or the size does not suit; raised on every rank.
        """
        collective, device, _ = world
        nodes = nodes_of(collective.uncounted, self.node_size, device)
        if len(nodes) == 1 or len(nodes) == collective.size:
            return self._outer.plan(sections, world)
        return Between(self._outer, nodes).plan(sections, world)


def replanned(pattern: Pattern, change: Callable[[Planner], Planner]) -> Pattern:
    """Return the pattern with its planner, or its outer exchange's planner, replaced by ``change(planner)``."""
    if isinstance(pattern, Planner):
        return change(pattern)
    outer = getattr(pattern, "outer", None)
    return replace(pattern, outer=change(outer)) if isinstance(outer, Planner) else pattern  # type: ignore[type-var]


def measured_by(pattern: Pattern) -> dict[str, Any]:
    """Return what the pattern's planner, or its outer exchange's planner, measured, as primitives."""
    planner = getattr(pattern, "outer", pattern)
    return planner.measured() if isinstance(planner, Planner) else {}
