"""Sums along a chain of ranks in each node, and an exchange between the leaders of the nodes.

Awan, Hamidouche, Hashmi, Panda, "S-Caffe: Co-designing MPI Runtimes and Caffe for Scalable Deep Learning on Modern GPU
Clusters", PPoPP 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.collectives import Collective, World, consensus
from lightning_compress.collectives.counting import all_gather_rounds
from lightning_compress.core.state import States
from lightning_compress.exchanges.exchange import Cost, Exchange, ExchangePlan, Planner, gather, scatter
from lightning_compress.exchanges.hierarchical import read_outer
from lightning_compress.exchanges.message import Section, zero_nonfinite
from lightning_compress.exchanges.nodes import nodes_of, side_by_side
from lightning_compress.exchanges.remote_error import UNREADABLE, DeferredError

CHUNK = 1 << 18
"""Smallest chunk that is sent as a message of its own, in elements: 0.1 ms at 10 GB/s."""
MOST = 64
"""Largest number of chunks."""


@dataclass(frozen=True)
class Chain(Exchange):
    """Dense sums along a chain of each node's ranks, and a compressed exchange between the first ranks of the nodes.

    Within a node, float32 sums pass from rank to rank in chunks, up to the first rank. The first rank encodes and
    exchanges them while the others wait. The mean returns to all ranks of the node. No rank receives two messages at
    once, and nodes may differ in size. S-Caffe's reduction is ``Chain("binomial")``. Only first ranks have a residual.

    Args:
        outer: the exchange between first ranks, by name, mapping or object; not "auto", which needs all ranks.
        node_size: number of ranks in a node, which are consecutive. None: ranks with the same host name form a node.

    Raises:
        ValueError: the outer exchange is unknown or cannot be used, or node_size is below 1.
    """

    outer: Exchange | dict[str, object] | str = "binomial"
    node_size: int | None = None

    plans_collectively: ClassVar[bool] = True

    def __post_init__(self) -> None:
        outer = read_outer("Chain", self.outer, self.node_size)
        if isinstance(outer, Planner):  # all ranks must measure and choose
            raise ValueError(
                "Chain(outer='auto'): only the first rank of a node communicates with other nodes, and cannot choose "
                "for all ranks; name the exchange between nodes, such as outer='binomial'"
            )
        object.__setattr__(self, "outer", outer)  # frozen; equal settings are equal, however they were given

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        cast(Exchange, self.outer).check(codec)

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``.

        Raises:
            ValueError: the exchange between first ranks cannot be used; on every rank.
        """
        (collective, device, _), between = world, cast(Exchange, self.outer)
        nodes = nodes_of(collective.uncounted, self.node_size, device, one_size=False)
        if len(nodes) == 1 or len(nodes) == collective.size:
            return between.plan(sections, world)
        inside = collective.part(nodes)
        leading = collective.part([[node[0] for node in nodes], [rank for node in nodes for rank in node[1:]]])
        led = None if inside.rank else lambda: between.plan(side_by_side(sections), world.among(leading))
        outer = agreed(led, collective.uncounted, device)
        return LeadersPlan(sections, outer, inside, len(nodes) / collective.size, device)


class Links:
    """The ranks of a node as a chain, from the last rank to the first, the leader.

    While a rank sends one chunk, it receives the next; no rank receives more than one message at a time. Chunks have no
    checksum: after an error all ranks of a chain have the same numbers, but those of other nodes differ.

    Attributes:
        row: float32 ``[numel]``: the numbers to sum, then the numbers to share.
        cost: of this rank, within the node.
    """

    def __init__(self, inside: Collective, numel: int, device: torch.device) -> None:
        self._inside = inside
        size = inside.size
        count = min(MOST, max(1, numel // CHUNK)) if size > 2 else 1  # with two ranks, nothing overlaps
        chunk, part = -(-numel // count), -(-numel // size)
        room = torch.zeros(max(count * chunk, size * part), dtype=torch.float32, device=device)
        self.row = room[:numel]
        self._chunks, self._parts = room[: count * chunk].view(count, chunk), room[: size * part].view(size, part)
        self._received = torch.empty(chunk, dtype=torch.float32, device=device)
        self._own = torch.empty(part, dtype=torch.float32, device=device)
        self._steps = count + size - 2 if size > 1 else 0
        rounds = self._steps + 1 + all_gather_rounds(size) if size > 1 else 0
        scattered, gathered = 4 * (size - 1) * part, 4 * (size - 1) * part
        sent = gathered + (4 * count * chunk if inside.rank else scattered)
        self.cost = Cost(bytes_sent=sent, rounds=rounds, inner_bytes=sent, inner_rounds=rounds)

    def reduce(self) -> None:
        """Write the sum over the ranks into the leader's row, added from the last rank on."""
        rank, count = self._inside.rank, len(self._chunks)
        before = self._inside.size - 1 - rank  # number of ranks before this one in the chain
        for step in range(self._steps):
            sent, due = step - before, step - before + 1
            sends = {rank - 1: self._chunks[sent]} if rank and 0 <= sent < count else {}
            receives = {rank + 1: self._received} if before and 0 <= due < count else {}
            self._inside.swap(sends, receives)
            if receives:
                self._chunks[due].add_(self._received)

    def share(self) -> None:
        """Copy the leader's row to all ranks: each receives a part of it, and all-gathers it (van de Geijn)."""
        rank, size = self._inside.rank, self._inside.size
        if size == 1:
            return
        others = {peer: self._parts[peer] for peer in range(1, size)}
        self._own.copy_(self._parts[0])
        self._inside.swap({} if rank else others, {0: self._own} if rank else {})
        self._inside.all_gather(self._own, self._parts)


def agreed(
    plan: Callable[[], ExchangePlan] | None, collective: Collective, device: torch.device
) -> ExchangePlan | None:
    """Return the leaders' plan, or None on other ranks. Collective: every rank must call it.

    Raises:
        ValueError: planning failed on a leader; on every rank.
    """
    planned, error = None, DeferredError()
    with error.deferred():
        planned = plan() if plan else None
    if any(consensus.anywhere([error.own is not None], collective, device)):
        error.raise_or("the first rank of a node cannot use the exchange between nodes; its own error says why")
    return planned


class LeadersPlan(ExchangePlan):
    """Sums along the chain to its leader, exchanges between the leaders, and shares with all ranks of the node.

    The leader encodes for its node and keeps the residual; the vectors of the other ranks become zeros.

    Args:
        sections: of the vectors.
        outer: the leaders' exchange of the same sections side by side. None on other ranks, whose cost omits it.
        inside: the ranks of this rank's node.
        share: number of leaders divided by the number of ranks.
        device: of the vectors.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        outer: ExchangePlan | None,
        inside: Collective,
        share: float,
        device: torch.device,
    ) -> None:
        self._spans = [each.span for each in sections]
        self._numel = sum(each.layout.numel for each in sections)
        self._outer = outer
        self._share = share
        self._chain = Links(inside, self._numel + 1, device)  # and the flag
        self._mean = torch.empty(self._numel if outer else 0, dtype=torch.float32, device=device)
        self.description = f"{outer.description if outer else 'leaders'} between chains of {inside.size}"
        self.cost = self._chain.cost
        if outer:
            self.cost, self.sum_ranks = self.cost + outer.cost, outer.sum_ranks
        self.cost = replace(self.cost, copies=5.0)  # into the row, the sum, the residual, the mean, out of the row

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        """See ``ExchangePlan.average``."""
        row, error = self._chain.row, DeferredError()
        gather(vector, self._spans, row)
        row[-1] = flag
        self._chain.reduce()
        for span in self._spans:
            vector[span] = 0.0
        if self._outer:
            own = row[:-1]
            torch.mul(row[-1], 0.0, out=flag)
            zero_nonfinite(own, flag)
            with error.deferred():  # the other ranks of the node wait, so errors are passed on by the flag
                self._outer.mean(own, self._mean, key, flag)
            error.mark(flag)
            scatter(own, self._spans, vector)
            torch.mul(self._mean, self._share, out=own)
            row[-1] = flag
        self._chain.share()
        flag.copy_(row[-1])
        if flag.isinf():
            error.raise_or(f"the first rank of a node {UNREADABLE}")
        flag.mul_(0.0)
        scatter(row, self._spans, out)
