"""Variance of a mean of rounded vectors: offsets of each rank's own, against offsets that ranks share and shift.

    python -m benchmarks.correlated

Rounding ``floor(x / step + u)`` is right on average for every uniform u. With ``u = (v + rank / ranks) mod 1`` and v
drawn alike by all ranks, at the same bits, errors cancel in part (Suresh, Sun, Ro, Yu, "Correlated Quantization
for Distributed Mean Estimation and Optimization", ICML 2022). No codec does it yet.
"""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table

NUMEL, DRAWS = 256, 400


def variance(bits: int, ranks: int, common: float, shared: bool) -> float:
    """Of the mean, times the ranks, over the squared norm of normal vectors.

    Args:
        bits: an element, whose levels are those of ``rotated``.
        ranks: how many.
        common: share of the vectors' variance that is the same on all ranks.
        shared: offsets are shared.
    """
    random, total = np.random.default_rng(bits), 0.0
    for _ in range(DRAWS):
        own = random.standard_normal((ranks, NUMEL))
        vectors = common**0.5 * random.standard_normal(NUMEL) + (1 - common) ** 0.5 * own
        steps = np.abs(vectors).max(1, keepdims=True) / (2 ** (bits - 1) - 0.5)
        if shared:
            offsets = (random.random(NUMEL) + np.arange(ranks)[:, None] / ranks) % 1
        else:
            offsets = random.random((ranks, NUMEL))
        rounded = (np.floor(vectors / steps - 0.5 + offsets) + 0.5) * steps
        total += ranks * np.square((rounded - vectors).mean(0)).sum() / np.square(vectors).mean(0).sum()
    return total / DRAWS


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser("correlated", description=__doc__).parse_args()
    shown = Table("bits", "ranks", "common", "own offsets", "shared", "ratio")
    for bits in (2, 3, 4):
        for ranks in (4, 8):
            for common in (0.0, 0.5, 0.9):
                own, shared = (variance(bits, ranks, common, each) for each in (False, True))
                figures = f"{own:.4f}", f"{shared:.4f}", f"{shared / own:.2f}"
                shown.add_row(str(bits), str(ranks), f"{common:g}", *figures)
    Console().print(shown)


if __name__ == "__main__":
    main()
