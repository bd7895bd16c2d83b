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

from collections.abc import Sequence
from dataclasses import asdict

import torch

from benchmarks._arguments import above_zero, described, file_to_write, plain_errors, positive
from benchmarks._scale.prediction import CPU, WAYS, Figures, predict
from benchmarks._scale.simulated import Cluster
from benchmarks.harness import tables
from benchmarks.harness.results import write
from lightning_compress.codecs import Codec, Dense
from lightning_compress.planning.cost import Link, Speeds
from lightning_compress.planning.link import time_codec

RANKS = [2**power for power in range(1, 13)]


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
    for what, field, scale in (("ms", "seconds", 1e3), ("MB a rank sends", "bytes_sent", 1e-6)):
        rows = (
            (name, *(f"{scale * getattr(each[count], field):,.4g}" if count in each else "" for count in counts))
            for name, each in found.items()
        )
        tables.show(["ranks", *map(str, counts)], rows, f"{what}: {title}", width=150)


@plain_errors()
def main() -> None:
    """Predict, or check predictions."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--numel", type=positive, default=25_000_000, help="of a model's gradient, in one bucket")
    add("--gbit", type=above_zero, default=10.0, help="of a node's network card")
    add("--latency-us", type=above_zero, default=30.0, help="between nodes; a tenth of it within")
    add("--inside", type=above_zero, default=10.0, help="how many times as fast links within a node are")
    add("--node-size", type=positive, default=8)
    add("--faster", type=above_zero, default=1.0, help="how many times as fast devices are as a core of this machine")
    add("--most", type=int, default=RANKS[-1], help="ranks, at most")
    add("--json", type=file_to_write, help="write the figures here")
    add("--plot", type=file_to_write, help="draw them here")
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
    figures = {name: {str(count): asdict(one) for count, one in each.items()} for name, each in found.items()}
    settings = {name: value for name, value in vars(given).items() if name not in ("json", "plot")}
    write(given.json, {"settings": settings, "figures": figures})
    if given.plot:
        from benchmarks._scale.plot import draw

        draw(found, title, given.plot)


if __name__ == "__main__":
    main()
