"""What a step's exchange takes on 2 to 4096 ranks: the exchanges' own code, on a simulated network.

    python -m benchmarks.scale                                  # nodes of 8 that share a card of 10 Gbit/s
    python -m benchmarks.scale --gbit 1 --node-size 1 --numel 12500000 --plot docs/scale.png

Every exchange runs once on a world of which this process is rank 0, and the others have what it has
(``benchmarks/_scale/simulated.py``): messages and bytes are counted, not assumed. Where the whole vector would take too
much memory for that, two shorter ones are sent, and bytes continued on the line through them. Each round then costs the
latency, bytes the bandwidth of the card that a node's ranks share, and encoding and decoding the speeds that the codecs
have on one core of this machine, or so many times faster. ``benchmarks.choices`` puts predictions of steps beside real
ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._arguments import above_zero, file_to_write, plain_errors, positive
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
from lightning_compress.planning.cost import Link, Speeds, device_seconds
from lightning_compress.planning.link import time_codec

CPU = torch.device("cpu")
RANKS = [2**power for power in range(1, 13)]
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


def speeds_of(codecs: Sequence[Codec], faster: float) -> dict[Codec, Speeds]:
    """Measured here, on one core, and divided."""
    torch.set_num_threads(1)
    found = {codec: time_codec(codec, CPU) for codec in dict.fromkeys(codecs)}
    return {codec: Speeds(*(value / faster for value in asdict(each).values())) for codec, each in found.items()}


def sweep(numel: int, ranks: Sequence[int], cluster: Cluster, faster: float) -> dict[str, dict[int, Figures]]:
    """Figures by way and number of ranks."""
    speeds = speeds_of([way.codec for way in WAYS.values()], faster)
    found: dict[str, dict[int, Figures]] = {}
    for name, way in WAYS.items():
        of = (speeds[way.codec], speeds[Dense()].decode_s)
        fitting = [count for count in ranks if way.fits(count, cluster.node_size)]
        found[name] = {count: predict(way, numel, count, cluster, *of) for count in fitting}
    return found


def show(found: dict[str, dict[int, Figures]], title: str) -> None:
    """Print two tables: milliseconds, and megabytes that a rank sends."""
    counts = sorted({count for each in found.values() for count in each})
    scales = {"ms": ("seconds", 1e3), "MB a rank sends": ("bytes_sent", 1e-6)}
    for what, (field, scale) in scales.items():
        table = Table("ranks", *(str(count) for count in counts), title=f"{what}: {title}")
        for name, figures in found.items():
            cells = (f"{scale * getattr(figures[count], field):,.4g}" if count in figures else "" for count in counts)
            table.add_row(name, *cells)
        Console(width=150).print(table)


@plain_errors()
def main() -> None:
    """Predict, or check predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=positive, default=25_000_000, help="of a model's gradient, in one bucket")
    parser.add_argument("--gbit", type=above_zero, default=10.0, help="of a node's network card")
    parser.add_argument("--latency-us", type=above_zero, default=30.0, help="between nodes; a tenth of it within")
    parser.add_argument(
        "--inside", type=above_zero, default=10.0, help="how many times as fast links within a node are"
    )
    parser.add_argument("--node-size", type=positive, default=8)
    parser.add_argument(
        "--faster", type=above_zero, default=1.0, help="how many times as fast devices are as a core of this machine"
    )
    parser.add_argument("--most", type=int, default=RANKS[-1], help="ranks, at most")
    parser.add_argument("--json", type=file_to_write, help="write the figures here")
    parser.add_argument("--plot", type=file_to_write, help="draw them here")
    given = parser.parse_args()
    if given.node_size not in (1, *RANKS):
        parser.error(f"--node-size {given.node_size}: ranks are powers of two, and so are their nodes; 1, 2, 4, ...")
    if given.most < RANKS[0]:
        parser.error(f"--most {given.most}: two ranks are the fewest that exchange anything")
    card = Link(given.latency_us * 1e-6, given.gbit * 1e9 / 8)
    cluster = Cluster(card, Link(card.latency_s / 10, card.bytes_per_s * given.inside), given.node_size)
    found = sweep(given.numel, [count for count in RANKS if count <= given.most], cluster, given.faster)
    title = f"{given.numel / 1e6:g} M elements, nodes of {given.node_size} share {given.gbit:g} Gbit/s"
    show(found, title)
    if given.json:
        figures = {name: {str(count): asdict(one) for count, one in each.items()} for name, each in found.items()}
        settings = {name: value for name, value in vars(given).items() if name not in ("json", "plot")}
        given.json.write_text(json.dumps({"settings": settings, "figures": figures}, indent=2))
    if given.plot:
        from benchmarks._scale.plot import draw

        draw(found, title, given.plot)


if __name__ == "__main__":
    main()
