"""What one exchange takes: its own code on a simulated network, and the speeds of codecs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from benchmarks._scale.simulated import Call, Cluster, SimulatedCollective, longer
from lightning_compress.codecs import FP16, Codec, Dense, OneBit, Rotated, TopK
from lightning_compress.collectives import CountingCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import (
    AllGather,
    AllReduce,
    Exchange,
    ExchangePlan,
    Hierarchical,
    SplitGather,
    TwoShot,
)
from lightning_compress.exchanges import parts as cut
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.cost import Speeds, device_seconds

CPU = torch.device("cpu")
SHORT = 1 << 18
"""Elements, at least, of the shorter one of two vectors."""
BLOCK = 1024
"""Shards are multiples of it, so that all are of one size."""
SPARSE = TopK(0.01)


@dataclass(frozen=True)
class Way:
    """A method on its way.

    Args:
        codec: the method.
        exchange: the pattern; between nodes if ``nodes``.
        nodes: hierarchical, on nodes of several ranks.
    """

    codec: Codec
    exchange: Exchange
    nodes: bool = False

    def on(self, node_size: int) -> Exchange:
        """The pattern for nodes of this size."""
        return Hierarchical(self.exchange, node_size) if self.nodes else self.exchange

    def fits(self, ranks: int, node_size: int) -> bool:
        """Whether there are such nodes."""
        return not self.nodes or (node_size > 1 and ranks >= 2 * node_size)


WAYS = {
    "dense": Way(Dense(), AllReduce()),
    "fp16": Way(FP16(), AllReduce()),
    "onebit, two_shot": Way(OneBit(), TwoShot()),
    "rotated, two_shot": Way(Rotated(), TwoShot()),
    "rotated, hierarchical": Way(Rotated(), TwoShot(), nodes=True),
    "topk 1 %, all_gather": Way(SPARSE, AllGather()),
    "topk 1 %, split_gather": Way(SPARSE, SplitGather()),
    "topk 1 %, hierarchical": Way(SPARSE, SplitGather(), nodes=True),
}


@dataclass(frozen=True)
class Figures:
    """Of one exchange, on one rank.

    Args:
        seconds: predicted, with encoding and decoding.
        wire_s: of that, messages on their way.
        bytes_sent: by this rank.
        card_bytes: by its node's network card.
        rounds: messages that wait for one another.
        sent_numel: elements of the longest vector that was really sent.
    """

    seconds: float
    wire_s: float
    bytes_sent: float
    card_bytes: float
    rounds: int
    sent_numel: int


def send(way: Way, numel: int, ranks: int, node_size: int) -> tuple[list[Call], int, ExchangePlan]:
    """One mean by the exchange's own code: the collectives that it issued, the bytes counted, and its plan."""
    meter, collective = Meter(CPU), SimulatedCollective(ranks, node_size)
    section = Section(evenly(way, numel, ranks), Layout.of([("weight", (numel // BLOCK, BLOCK))]), 0)
    with patch.object(cut, "MOST", 1):  # nothing overlaps, at any length
        plan = way.on(node_size).plan([section], World(CountingCollective(collective, meter), CPU, meter))
    vector = vector_of(numel, ranks // node_size if way.nodes else ranks, node_size if way.nodes else 1)
    collective.calls.clear()  # those that found the nodes
    counted = meter.bytes_sent
    plan.mean(vector, torch.empty(numel), 1, torch.zeros(()))
    return collective.calls, meter.bytes_sent - counted, plan


def evenly(way: Way, numel: int, shards: int) -> Codec:
    """The way's codec; where shards end by what was selected, one that selects equally many in each."""
    if not isinstance(way.exchange, SplitGather) or not isinstance(way.codec, TopK):
        return way.codec
    each = max(1, round(way.codec.density * numel / shards))
    return replace(way.codec, density=(each * shards - 0.5) / numel, selection="exact")


def vector_of(numel: int, shards: int, summands: int) -> torch.Tensor:
    """Numbers of which all shards have the same ones in another order: they select equally many, in other places.

    So do the shards of the sum of its ``summands`` parts, which the ranks of a node have in turn.
    """
    generator = torch.Generator().manual_seed(shards)
    if numel % (shards * summands):
        return torch.randn(numel, generator=generator)
    length = numel // shards // summands
    parts = torch.randn(length, generator=generator)[torch.rand(summands, length, generator=generator).argsort(dim=1)]
    orders = torch.rand(shards, length, generator=generator).argsort(dim=1)
    return parts[:, orders].flatten()


def predict(way: Way, numel: int, ranks: int, cluster: Cluster, speeds: Speeds, copy_s: float) -> Figures:
    """What a mean over so many elements takes."""
    unit = BLOCK if isinstance(way.exchange, AllGather | AllReduce) and not way.nodes else BLOCK * ranks
    least = -(-SHORT // unit) * unit
    short, _, _ = send(way, least, ranks, cluster.node_size)
    long, _, plan = send(way, 2 * least, ranks, cluster.node_size)
    calls = longer(short, long, numel / least)
    wire = sum(call.seconds(cluster) for call in calls)
    return Figures(
        seconds=wire + device_seconds(plan.cost, [(numel, speeds)], copy_s),
        wire_s=wire,
        bytes_sent=sum(call.sent for call in calls),
        card_bytes=sum(call.card_bytes(cluster) for call in calls if call.leaves),
        rounds=sum(call.rounds for call in calls),
        sent_numel=2 * least,
    )
