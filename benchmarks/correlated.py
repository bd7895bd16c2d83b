"""Variance of a mean that several ranks round: by random bits of their own, and by bits that they share.

    python -m benchmarks.correlated
    python -m benchmarks.correlated --ranks 4 8 16 --steps 20

Ranks are threads. Of each method, with and without its setting ``correlated`` (see ``Rotated``), at the same bits: the
squared error of the mean, times the ranks, over the mean square of the vectors; through the exchange that ``auto``
takes, which from 4 ranks on encodes a sum once more, and through ``all_gather``, which does not. Vectors are normal,
a part of them (by variance) common to all ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_compress.codecs import QSGD, Codec, Rotated
from lightning_compress.collectives import Collective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.natural import Natural
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllGather, Pattern
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.choose import Auto

CPU = torch.device("cpu")
LAYOUT = Layout.of([("matrix", (128, 128)), ("odd", (37, 101))])
CODECS: dict[str, Rotated | QSGD | TernGrad | Natural] = {
    "rotated 2 bits": Rotated(2),
    "rotated 3 bits": Rotated(3),
    "rotated 4 bits": Rotated(),
    "qsgd 2 bits": QSGD(2),
    "qsgd 4 bits": QSGD(),
    "terngrad": TernGrad(),
    "natural": Natural(),
}
COMMON = 0.0, 0.5, 1.0
LINK = {"latency_s": 1e-6, "bytes_per_s": 1.25e8}
"""On which bytes count: small vectors go the way of large ones."""


def variance(codec: Codec, exchange: Pattern, ranks: int, common: float, steps: int) -> tuple[float, str]:
    """Of the mean, see above; and which exchange it was.

    Args:
        codec: of the messages.
        exchange: in which they travel.
        ranks: how many.
        common: share of the vectors' variance that is the same on all ranks.
        steps: means, over which the variance is averaged.
    """
    shared = common**0.5 * _normal(1000)

    def program(collective: Collective) -> tuple[float, str]:
        plan = exchange.plan([Section(codec, LAYOUT, 0)], World(collective, CPU, Meter(CPU)))
        parts = [shared + (1 - common) ** 0.5 * _normal(rank) for rank in range(ranks)]
        exact, square = torch.stack(parts).double().mean(0), torch.stack(parts).double().square().sum() / ranks
        out, total = torch.empty(LAYOUT.numel), 0.0
        for key in range(steps):
            plan.mean(parts[collective.rank].clone(), out, key, torch.tensor(0.0))
            total += float((out - exact).square().sum() / square)
        return ranks * total / steps, plan.description

    return run_threads(ranks, program)[0]


def _normal(seed: int) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("method", "ranks", "common", "exchange", "own bits", "shared", "ratio", "ratio in all_gather")
    auto = Auto("never", link=LINK)
    for name, codec in CODECS.items():
        correlated = replace(codec, correlated=True)
        for ranks in arguments.ranks:
            for common in COMMON:
                given = ranks, common, arguments.steps
                (own, way), (shared, _) = (variance(each, auto, *given) for each in (codec, correlated))
                (alone, _), (together, _) = (variance(each, AllGather(), *given) for each in (codec, correlated))
                figures = f"{own:.4f}", f"{shared:.4f}", f"{shared / own:.2f}", f"{together / alone:.2f}"
                table.add_row(name, str(ranks), f"{common:g}", way, *figures)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
