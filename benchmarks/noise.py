"""What exchanges leave of the noise of unbiased methods, and of the errors of ``fft`` and ``dct``, at 4 and 8 ranks.

    python -m benchmarks.noise

Ranks are threads; 19,472 normal numbers, equal on all ranks, for the former; for the latter 65,536 whose neighbours are
correlated by 0.9, half of them (by variance) common to all ranks. Bits are those that a rank sends for an element.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_compress.codecs import CODECS, FFT, QSGD, Codec, Rotated
from lightning_compress.collectives import Collective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.dct import DCT
from lightning_compress.contrib.codecs.natural import Natural
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.contrib.exchanges.binomial import Binomial
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllGather, Exchange, ExchangePlan, TwoShot
from lightning_compress.exchanges.message import Section

CPU = torch.device("cpu")
STEPS, REACH = 30, 128
WAYS: dict[str, Exchange] = {
    "all_gather": AllGather(),
    "two_shot": TwoShot(),
    "two_shot, same": TwoShot(sums="same"),
    "binomial": Binomial(),
}
UNBIASED: dict[str, Codec] = {
    "terngrad": TernGrad(),
    "qsgd 2 bits": QSGD(2),
    "qsgd 4 bits": QSGD(),
    "rotated 4 bits": Rotated(),
    "natural": Natural(),
}
UNBIASED |= {  # those that have no settings above, with their defaults
    name: codec
    for name, codec in ((name, kind()) for name, kind in CODECS.complete().items())
    if type(codec) not in map(type, UNBIASED.values())
    if codec.reencodable and not (codec.contractive or codec.sum_dtype)
}
SPECTRAL: dict[str, Codec] = {"fft": FFT(), "dct": DCT()}


def planned(codec: Codec, exchange: Exchange, collective: Collective, layout: Layout) -> ExchangePlan:
    """A plan for one matrix or several."""
    return exchange.plan([Section(codec, layout, 0)], World(collective, CPU, Meter(CPU)))


def variance(codec: Codec, exchange: Exchange, ranks: int) -> str:
    """Of the mean, over the square of the gradient; and bits."""
    layout = Layout.of([("conv", (16, 9, 9, 9)), ("linear", (101, 67)), ("odd", (3, 347))])
    same = torch.randn(layout.numel, generator=torch.Generator().manual_seed(3))

    def work(collective: Collective) -> tuple[float, float]:
        plan, mean = planned(codec, exchange, collective, layout), torch.empty_like(same)
        plan.mean(same.clone(), mean, 5, torch.tensor(0.0))
        return float((mean - same).square().sum() / same.square().sum()), 8 * plan.cost.bytes_sent / layout.numel

    left, bits = run_threads(ranks, work)[0]
    return f"{left:.4f} ({bits:.1f})"


def gradient(rank: int, step: int, numel: int) -> Tensor:
    """Smooth noise, half of it of all ranks; float32 ``[numel]``."""
    kernel = 0.9 ** torch.arange(REACH).float()
    seeds = step, 1000 * (rank + 1) + step
    noise = [torch.randn(numel + REACH - 1, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.nn.functional.conv1d(sum(noise)[None], (kernel / kernel.norm())[None, None])[0] / 2**0.5  # type: ignore[index]


def errors(codec: Codec, exchange: Exchange, ranks: int) -> str:
    """Of one mean; of all residuals together after steps with error feedback, over the sum of gradients; and bits."""
    layout = Layout.of([("matrix", (256, 256))])
    numel = layout.numel

    def work(collective: Collective) -> tuple[Tensor, Tensor, float]:
        plan, mean, first = planned(codec, exchange, collective, layout), torch.empty(numel), torch.empty(numel)
        plan.mean(gradient(collective.rank, 0, numel), first, 7, torch.tensor(0.0))
        residual = torch.zeros(numel)
        for step in range(STEPS):
            residual += gradient(collective.rank, step, numel)
            plan.mean(residual, mean, step, torch.tensor(0.0))
        return first, residual, 8 * plan.cost.bytes_sent / numel

    found = run_threads(ranks, work)
    first, last = (sum(gradient(rank, step, numel) for rank in range(ranks)) for step in (0, STEPS - 1))
    error = float((ranks * found[0][0] - first).norm() / first.norm())  # type: ignore[union-attr]
    owed = float(sum(residual for _, residual, _ in found).norm() / last.norm())  # type: ignore[union-attr]
    return f"{error:.3f}, {owed:.2f} ({found[0][2]:.1f})"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for title, codecs, figure in (
        ("variance over the square (bits)", UNBIASED, variance),
        ("error of a mean, norm of residuals (bits)", SPECTRAL, errors),
    ):
        table = Table("method, ranks", *WAYS, title=title)
        for name, codec in codecs.items():
            for ranks in arguments.ranks:
                table.add_row(f"{name}, {ranks}", *(figure(codec, way, ranks) for way in WAYS.values()))
        Console(width=130).print(table)


if __name__ == "__main__":
    main()
