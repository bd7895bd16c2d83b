"""Which ranks share a node, a description of the cluster, and the exchange of a node's sum between nodes."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_compress.collectives import Collective, World, consensus
from lightning_compress.collectives.counting import all_gather_rounds, all_to_all_rounds
from lightning_compress.core.random import mix
from lightning_compress.core.state import States
from lightning_compress.exchanges.exchange import (
    META,
    Cost,
    Exchange,
    ExchangePlan,
    Pattern,
    gather,
    scatter,
)
from lightning_compress.exchanges.message import Section, zero_nonfinite


@dataclass(frozen=True)
class Cluster:
    """Where a run takes place. Measurements from another cluster are not valid here.

    Args:
        ranks: the number of ranks.
        nodes: the number of hosts.
        hosts: a digest of the host names, in the order of the ranks.
    """

    ranks: int
    nodes: int
    hosts: str

    @classmethod
    def of(cls, collective: Collective, device: torch.device) -> Cluster:
        """Return the cluster of these ranks. Collective."""
        hosts = hosts_of(collective, device)
        return cls(len(hosts), len(set(hosts)), hashlib.sha256(b"".join(hosts)).hexdigest()[:16])


def hosts_of(collective: Collective, device: torch.device) -> list[bytes]:
    """Return each rank's host name, padded to 256 bytes. Collective."""
    name = socket.gethostname().encode()[:256].ljust(256, b"\0")
    row = torch.frombuffer(bytearray(name), dtype=torch.uint8).to(device)
    return [bytes(row) for row in consensus.gathered(row, collective).tolist()]


def check_node_size(name: str, size: object) -> None:
    """Raise ValueError unless ``size`` is a number of ranks or None; ``name`` is the class's, for the message."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"{name}(node_size={size!r}): it must be a number of ranks, 1 or more, or null")


def nodes_of(collective: Collective, size: int | None, device: torch.device, one_size: bool = True) -> list[list[int]]:
    """Return the ranks of each node, in order. Collective.

    Args:
        collective: the ranks.
        size: ranks per node, consecutive in rank order; None: ranks with the same host name form a node.
        device: where host names are gathered.
        one_size: all nodes must have the same size.

    Raises:
        ValueError: nodes differ in size although ``one_size`` is true.
    """
    if size is not None:
        names = [rank // size for rank in range(collective.size)]
    else:
        hosts = hosts_of(collective, device)
        names = [hosts.index(host) for host in hosts]
    nodes = [[rank for rank, name in enumerate(names) if name == node] for node in dict.fromkeys(names)]
    if one_size and len({len(node) for node in nodes}) > 1:
        raise ValueError(
            f"exchange='hierarchical' needs nodes of one size, but the {collective.size} ranks are on nodes of "
            f"{', '.join(str(len(node)) for node in nodes)}; set node_size to a divisor of {collective.size}, or use "
            "exchange='chain' or 'auto'"
        )
    return nodes


@dataclass(frozen=True)
class Between(Exchange):
    """Each rank exchanges one part of its node's sum with the ranks of the same index in the other nodes.

    Args:
        outer: the exchange between nodes.
        nodes: the ranks of each node: at least two nodes of one size, at least 2.
    """

    outer: Pattern
    nodes: Sequence[Sequence[int]]

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        collective, device, _ = world
        inside, between = collective.part(self.nodes), collective.part(list(zip(*self.nodes, strict=True)))
        parts = [[section.shard(index, inside.size) for section in sections] for index in range(inside.size)]
        own, peers = parts[inside.rank], world.among(between)
        widest = max(parts, key=_numel)
        outer = self.outer.choose(side_by_side(own), peers, collective)
        plan = outer.plan(side_by_side(own), peers)
        most = plan if own is widest else outer.plan(side_by_side(widest), peers._replace(device=META))
        return _PartsPlan(parts, plan, most.cost, inside, device)


def side_by_side(sections: Sequence[Section]) -> list[Section]:
    """Return the sections as they lie in a vector that contains nothing else, and of which nothing is marked."""
    moved, start = [], 0
    for section in sections:
        moved.append(replace(section, start=start, marks=None))
        start += section.layout.numel
    return moved


def _numel(part: Sequence[Section]) -> int:
    return sum(each.layout.numel for each in part)


class _PartsPlan(ExchangePlan):
    def __init__(
        self, parts: list[list[Section]], outer: ExchangePlan, most: Cost, inside: Collective, device: torch.device
    ) -> None:
        self._spans = [[each.span for each in part] for part in parts]
        self._numels = [_numel(part) for part in parts]
        self._outer = outer
        self._inside = inside
        width = max(self._numels) + 1  # with the flag
        self._width, self._device = width, device
        self.description = f"{outer.description} between nodes of {inside.size}"
        sent = 2 * (inside.size - 1) * 4 * width
        rounds = all_to_all_rounds(inside.size) + all_gather_rounds(inside.size)
        inner = Cost(bytes_sent=sent, rounds=rounds, inner_bytes=sent, inner_rounds=rounds)
        # four copies: into rows, their sum, the residual, out of rows
        self.cost, self._compared = (
            replace(each.scaled(1 / inside.size) + inner, copies=4.0) for each in (outer.cost, most)
        )
        self.sum_ranks = outer.sum_ranks

    @property
    def compared(self) -> Cost:
        return self._compared

    @cached_property
    def _buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows to send, rows received, and one part's mean, allocated in the first ``mean``."""
        rows = torch.zeros(self._inside.size, self._width, dtype=torch.float32, device=self._device)
        return rows, torch.empty_like(rows), torch.empty(self._width, dtype=torch.float32, device=self._device)

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._inside.rank, self._inside.size
        rows, received, own_mean = self._buffers
        for row, spans in zip(rows, self._spans, strict=True):
            gather(vector, spans, row)
            row[-1] = flag
            for span in spans:  # other plans handle the rest of the vector
                vector[span] = 0.0
        self._inside.all_to_all(rows, received)
        total = received[0]
        for row in received[1:]:
            total.add_(row)
        flag.copy_(total[-1])
        numel = self._numels[rank]
        node_sum, mean = total[:numel], own_mean[:numel]
        zero_nonfinite(node_sum, flag)
        self._outer.mean(node_sum, mean, mix(key, rank), flag)
        scatter(node_sum, self._spans[rank], vector)
        torch.mul(mean, 1 / size, out=mean)
        own_mean[-1] = flag
        self._inside.all_gather(own_mean, rows)
        for row, spans in zip(rows, self._spans, strict=True):
            scatter(row, spans, out)
            flag.add_(row[-1])
