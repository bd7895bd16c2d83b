"""The quadratic of 8 ranks on a ring at one bit: with slack they come to the optimum, without it they part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lightning_compress.collectives import Collective, run_threads
from lightning_compress.core.layout import Layout
from lightning_compress.gossip.dpsgd import DPSGD
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import build_topology

RANKS, NUMEL, RATE, THETA, ROUNDS = 8, 1000, 0.01, 1.0, 1500
SLACKS: dict[str, float | None] = {
    "full precision": None,
    "slack 0.03": 0.03,
    "slack 0.1": 0.1,
    "slack 0.3": 0.3,
    "no slack": 1.0,
}


def curve(slack: float | None, bits: int = 1, rounds: int = ROUNDS) -> npt.NDArray[np.float64]:
    """The largest error of the ranks' mean, and the largest distance of a rank from it, ``[rounds, 2]``."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(NUMEL, generator=generator)
    centres = common + 0.1 * torch.randn(RANKS, NUMEL, generator=generator)
    graph = build_topology("ring", RANKS)
    settings = None if slack is None else Moniqua(bits, "dither", slack, THETA, verify=False)

    def rank(collective: Collective) -> list[torch.Tensor]:
        vector, layout = torch.zeros(NUMEL), Layout.of([("x", (NUMEL,))])
        mixing = DPSGD().begin(vector, Neighbours(collective, graph), settings, layout, 0)
        noise, models = torch.Generator().manual_seed(collective.rank + 1), []
        for _ in range(rounds):
            gradient = vector - centres[collective.rank] + 0.1 * torch.randn(NUMEL, generator=noise)
            vector -= RATE * gradient
            mixing.mix(vector, RATE)
            models.append(vector.clone())
        return models

    models = torch.stack([torch.stack(each) for each in run_threads(RANKS, rank)]).double()
    mean = models.mean(0)
    off = (mean - centres.double().mean(0)).abs().amax(1)
    return torch.stack([off, (models - mean).abs().amax((0, 2))], 1).numpy()


def draw(path: Path, rounds: int = ROUNDS) -> dict[str, tuple[float, float]]:
    """Run all, draw them, and return where each ended."""
    from recipes.tables.drawing import canvas, caption, legend, save

    curves = {label: curve(slack, rounds=rounds) for label, slack in SLACKS.items()}
    title = "Moniqua at 1 bit: with slack the mean model reaches the optimum, without slack the ranks part"
    figure, panels = canvas(title, (10.4, 3.8), 2)
    for place, axes in enumerate(panels):
        for number, (label, each) in enumerate(curves.items()):
            mark = {"marker": "os^Dv"[number % 5], "markevery": (number * rounds // 40, max(1, rounds // 8)), "ms": 4}
            axes.semilogy(np.maximum(each[:, place], 1e-5), label=label, lw=1.2, **mark)
        caption(axes, ("error of the mean model, largest of 1,000", "distance of a rank from the mean, largest")[place])
        axes.set_xlabel("rounds; 8 ranks on a ring")
        axes.set_ylabel("largest difference in a number")
    legend(figure, *panels)
    save(figure, path)
    return {label: (float(each[-1, 0]), float(each[-1, 1])) for label, each in curves.items()}
