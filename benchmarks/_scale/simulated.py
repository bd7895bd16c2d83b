"""A world of any size in one process: what this rank has stands for what everybody has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from benchmarks._gpu.echo import EchoCollective
from lightning_compress.collectives import Collective
from lightning_compress.collectives.collective import Operation
from lightning_compress.collectives.counting import (
    all_gather_rounds,
    all_reduce_bytes,
    all_reduce_rounds,
    all_to_all_rounds,
)
from lightning_compress.planning.cost import Link


@dataclass(frozen=True)
class Cluster:
    """Ranks in nodes, which are neighbours in the order of ranks.

    Args:
        card: a node's network card, which its ranks share.
        inside: between two ranks of a node.
        node_size: ranks of a node.
    """

    card: Link
    inside: Link
    node_size: int


@dataclass(frozen=True)
class Call:
    """One collective, as all ranks of a part issue it at the same time.

    Args:
        kind: "all_reduce", "all_gather", "all_to_all" or "swap".
        sent: bytes that a rank sends; a float where it was worked out from smaller vectors.
        ranks: of a part.
        together: how many of them are on one node.
    """

    kind: str
    sent: float
    ranks: int
    together: int

    @property
    def rounds(self) -> int:
        """Messages that wait for one another."""
        known = {"all_reduce": all_reduce_rounds, "all_gather": all_gather_rounds, "all_to_all": all_to_all_rounds}
        return known[self.kind](self.ranks) if self.kind in known else 1

    @property
    def leaves(self) -> bool:
        """Whether anything leaves a node."""
        return self.together < self.ranks

    def card_bytes(self, cluster: Cluster) -> float:
        """What a node's card sends, for all parts that have ranks there.

        All-reduce and all-gather visit the ranks node by node, so that a part's data leaves a node once; in an
        all-to-all every rank has something for every rank of the other nodes.
        """
        parts = cluster.node_size // self.together
        if self.kind == "all_to_all":
            return parts * self.together * self.sent * (self.ranks - self.together) / max(1, self.ranks - 1)
        return parts * self.sent

    def seconds(self, cluster: Cluster) -> float:
        """Latency of each round, then bytes over the narrowest place."""
        inside = self.sent / cluster.inside.bytes_per_s if self.together > 1 else 0.0
        if not self.leaves:
            return self.rounds * cluster.inside.latency_s + inside
        card = self.card_bytes(cluster) / cluster.card.bytes_per_s
        return self.rounds * cluster.card.latency_s + max(card, inside)


class SimulatedCollective(EchoCollective):
    """Writes down what it is asked for.

    Messages that come from other ranks are this rank's own: from each one that which was for it. So shards must be
    equal, which they are where the vector's length is a multiple of ranks and blocks.

    Args:
        size: ranks.
        node_size: of a node.

    Attributes:
        calls: so far, those of its parts included.
    """

    def __init__(self, size: int, node_size: int = 1) -> None:
        super().__init__(size)
        self._ranks = list(range(size))
        self._node_size = node_size
        self.calls: list[Call] = []

    def _note(self, kind: str, sent: int) -> None:
        together = sum(rank // self._node_size == self._ranks[0] // self._node_size for rank in self._ranks)
        self.calls.append(Call(kind, sent, self.size, together))

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        self._note("all_reduce", all_reduce_bytes(tensor.nbytes, self.size))
        super().all_reduce(tensor, operation)

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        self._note("all_gather", (self.size - 1) * tensor.nbytes)
        super().all_gather(tensor, out)

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """What it has for each of them."""
        self._note("all_to_all", (self.size - 1) * send[0].nbytes)
        receive.copy_(send)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        self._note("swap", sum(tensor.nbytes for tensor in sends.values()))
        super().swap(sends, receives)

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """The part that rank 0 is in."""
        own = next(list(part) for part in ranks if 0 in part)
        made = SimulatedCollective(len(own), self._node_size)
        made._ranks, made.calls = [self._ranks[place] for place in own], self.calls
        return made


def longer(short: Sequence[Call], long: Sequence[Call], times: float) -> list[Call]:
    """The calls for a vector that is so many times as long as that of ``short``, on the line through two lengths.

    Args:
        short: calls for some vector.
        long: the same for one twice as long.
        times: 1 or more.

    Raises:
        ValueError: the exchange did something else at the other length.
    """
    if [(each.kind, each.ranks) for each in short] != [(each.kind, each.ranks) for each in long]:
        raise ValueError("the exchange changes its mind between the two lengths")
    pairs = zip(short, long, strict=True)
    return [replace(low, sent=low.sent + (times - 1) * (high.sent - low.sent)) for low, high in pairs]
