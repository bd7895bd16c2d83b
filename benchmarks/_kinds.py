"""Errors at equal bits by kind of layer, and the spectra behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def kind(name: str, gradient: Tensor) -> str:
    """Return the kind of layer that a parameter belongs to."""
    if gradient.dim() == 4:
        return "convolution"
    return next((each for each in ("lstm", "embedding") if each in name), "linear").replace("lstm", "recurrent")


def by_kind(steps: list[Step]) -> dict[str, list[Step]]:
    """Return the matrices and filters of each kind of layer, those that are large enough to be compressed."""
    kinds: dict[str, list[str]] = {}
    for name in compare(steps[:1], ["none"]).parameters:
        kinds.setdefault(kind(name, steps[0][name]), []).append(name)
    return {each: [{name: step[name] for name in names} for step in steps] for each, names in kinds.items()}


def errors(steps: list[Step]) -> tuple[str, ...]:
    """Return the elements, and the error of single messages by each method that is compared."""
    found = compare(steps, COMPARED.values(), error_feedback=False)
    return (f"{found.numel:,}", *(f"{100 * row.error:.0f} %" for row in found.rows))


def spectrum(steps: list[Step]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``fft`` sees of a kind of layer.

    Returns:
        Mean power by frequency over the mean of all, float32 ``[BLOCK / 2]``; and the relative error that is left if
        the largest share of coefficients, or of elements, of each block is kept, ``[BLOCK / 2]`` each.
    """
    rows = torch.cat([torch.cat([each.reshape(-1) for each in step.values()]) for step in steps])
    rows = rows[: len(rows) // BLOCK * BLOCK].view(-1, BLOCK)
    power = torch.fft.rfft(rows).abs()[:, 1:].square()  # without the mean
    mean = power.mean(0)
    squares = rows.square().view(len(rows), -1)
    kept = (each.sort(descending=True).values.cumsum(-1).sum(0) for each in (power, squares))
    left = [(1 - each / each[-1]).clamp(min=0).sqrt() for each in kept]
    return mean / mean.mean(), left[0], left[1][1::2]


def draw(spectra: dict[str, dict[str, tuple[Tensor, Tensor, Tensor]]], path: Path) -> None:
    """Write the picture, a PNG: a column for each kind of layer, by model."""
    from recipes.tables.drawing import canvas, caption, legend, save

    noise = spectrum([{"noise": torch.randn(100, BLOCK, generator=torch.Generator().manual_seed(0))}])
    shares = torch.arange(1, BLOCK // 2 + 1) * 2 / BLOCK
    columns = len(spectra)
    title = "The spectra of convolutions decay, those of linear and recurrent layers are flat"
    figure, axes = canvas(title, (3.6 * columns + 1.6, 6.2), columns, nrows=2, sharex="row", sharey="row")
    colors = {"resnet": "#1f77b4", "alexnet": "#d62728", "lstm": "#2ca02c", "white noise": "#999999"}
    for (name, found), above, below in zip(spectra.items(), axes[:columns], axes[columns:], strict=True):
        caption(above, f"{name}: power by frequency")
        caption(below, "largest coefficients kept (lines), or elements (dashed)")
        for label, (power, coefficients, elements) in (found | {"white noise": noise}).items():
            look: dict[str, Any] = {"color": colors[label], "lw": 1.3}
            above.loglog(torch.arange(1, 129) / 256, power.view(128, -1).mean(1), label=label, **look)
            below.plot(shares, coefficients, **look)
            below.plot(shares, elements, "--", **look)
        above.set_xlabel("cycles per element")
        below.set(xscale="log", xlim=(0.005, 1), xlabel="share kept; fft: 0.15")
        below.axvline(0.15, color="#cccccc", lw=0.8)
        below.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0].set_ylabel("power over its mean")
    axes[columns].set_ylabel("relative error")
    legend(figure, *axes)
    save(figure, path)
