"""Errors at equal bits by kind of layer, and the spectra behind them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks._network.methods import SETS
from benchmarks._sweeps import Step
from lightning_compress import compare

COMPARED = {
    "fft, 5-bit, 2 bits": {"name": "fft", "theta": 0.706, "bits": 5},
    **{name: each["compressor"] for name, each in SETS["2_bits"].items()},
    "fft, 5-bit, 4 bits": {"name": "fft", "theta": 0.306, "bits": 5},
    **{name: each["compressor"] for name, each in SETS["4_bits"].items()},
    "topk 15 %": {"name": "topk", "density": 0.15},
}
"""At 2 bits, then at 4; and as many elements as fft keeps coefficients at theta 0.85, at 9.6 bits."""
BLOCK = 4096
"""Elements that are transformed together, as fft does."""


def by_kind(steps: list[Step]) -> dict[str, list[Step]]:
    """Return the matrices and filters of each kind of layer, those that are large enough to be compressed."""
    kinds: dict[str, list[str]] = {}
    for name in compare(steps[:1], ["none"]).parameters:
        other = "recurrent" if "lstm" in name else "embedding" if "embedding" in name else "linear"
        kinds.setdefault("convolution" if steps[0][name].dim() == 4 else other, []).append(name)
    return {each: [{name: step[name] for name in names} for step in steps] for each, names in kinds.items()}


def spectrum(steps: list[Step]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``fft`` sees of a kind of layer.

    Returns:
        Mean power by frequency over the mean of all, float32 ``[BLOCK / 2]``; and the relative error that is left if
        the largest share of coefficients, or of elements, of each block is kept, ``[BLOCK / 2]`` each.
    """
    vector = torch.cat([each.reshape(-1) for step in steps for each in step.values()])
    rows = vector[: len(vector) // BLOCK * BLOCK].view(-1, BLOCK)
    power = torch.fft.rfft(rows).abs()[:, 1:].square()  # without the mean
    kept = (each.sort(descending=True).values.cumsum(-1).sum(0) for each in (power, rows.square()))
    coefficients, elements = ((1 - each / each[-1]).clamp(min=0).sqrt() for each in kept)
    return power.mean(0) / power.mean(), coefficients, elements[1::2]


def draw(spectra: dict[str, dict[str, tuple[Tensor, Tensor, Tensor]]], path: Path) -> None:
    """Write the picture, a PNG: a column for each kind of layer, by model."""
    from recipes.tables.drawing import canvas, caption, legend, save

    noise, columns = spectrum([{"noise": torch.randn(100, BLOCK)}]), len(spectra)
    shares = torch.arange(1, BLOCK // 2 + 1) * 2 / BLOCK
    title = "The spectra of convolutions decay, those of linear and recurrent layers are flat"
    figure, axes = canvas(title, (3.6 * columns + 1.6, 6.2), columns, nrows=2, sharex="row", sharey="row")
    colors = {"resnet": "#1f77b4", "alexnet": "#d62728", "lstm": "#2ca02c", "white noise": "#999999"}
    for (name, found), above, below in zip(spectra.items(), axes[:columns], axes[columns:], strict=True):
        caption(above, f"{name}: power by frequency")
        caption(below, "largest coefficients kept (lines), or elements (dashed)")
        for label, (power, coefficients, elements) in (found | {"white noise": noise}).items():
            above.loglog(torch.arange(1, 129) / 256, power.view(128, -1).mean(1), color=colors[label], label=label)
            below.plot(shares, coefficients, "-", shares, elements, "--", color=colors[label])
        above.set_xlabel("cycles per element")
        below.set(xscale="log", xlim=(0.005, 1), xlabel="share kept; fft: 0.15")
    axes[0].set_ylabel("power over its mean")
    axes[columns].set_ylabel("relative error")
    legend(figure, *axes)
    save(figure, path)
