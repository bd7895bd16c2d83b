"""Error against bits: one column for each model, all methods above, the orders of FFT below."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

Curve = list[tuple[float, float]]
"""Measured bits per element, relative error."""
COLORS = {
    "fft": "#f4a3a3",
    "fft, coarse": "#d62728",
    "dct, coarse": "#ff7f0e",
    "topk": "#2ca02c",
    "onebit": "#8c564b",
    "efsign": "#e377c2",
    "qsgd": "#17becf",
    "rotated": "#1f77b4",
    "range_float": "#9467bd",
    "natural": "#7f7f7f",
    "fp16": "#bcbd22",
    "bf16": "#393b79",
}
MORE_COLORS = ("#000000", "#637939", "#843c39", "#7b4173", "#3182bd", "#e6550d", "#31a354", "#756bb1")
MARKERS = "os^DvPX<>ph*d8"
ORDER_COLORS = {"as is": "#d62728", "transposed": "#1f77b4", "permuted": "#2ca02c", "per parameter": "#9467bd"}
MOST_BITS = 10
"""Methods that send more (casts) would make the rest small; the tables have them."""
TITLES = {"resnet": "ResNet-20, CIFAR-10", "lstm": "character LSTM, Multi30k"}


def draw(figures: dict[str, dict[str, dict[str, Curve]]], path: Path) -> None:
    """Write the picture, a PNG of 128 colours.

    Args:
        figures: by model: "methods", "without error feedback" and "with error feedback", each by label.
        path: file to write.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from PIL import Image

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.6 * len(figures) + 2.0, 9.0), layout="constrained", dpi=100)
        axes = figure.subplots(2, len(figures), squeeze=False, sharex="row", sharey="row", height_ratios=(3, 2))
        for (model, parts), above, below in zip(figures.items(), *axes, strict=True):
            above.set_title(f"{TITLES.get(model, model)}\none gradient, without error feedback")
            _methods(above, parts["methods"])
            below.set_title("sum of ten gradients\ncoarse fft, by order of elements")
            _orders(below, parts)
            _frame(above, 0.005, 1.7)
            _frame(below, 0.005, 1.1)
        for row in axes:
            row[0].set_ylabel("relative error")
            row[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    Image.open(picture).convert("RGB").quantize(128).save(path, optimize=True)


def _methods(axes: Any, curves: dict[str, Curve]) -> None:
    bits = [0.25 * 1.1**power for power in range(38)]
    axes.plot(
        bits, [2.0**-each for each in bits], color="#cccccc", lw=4, zorder=0, label="$2^{-bits}$, normal data's least"
    )
    more = iter(MORE_COLORS * len(curves))
    shown = {label: curve for label, curve in curves.items() if curve[0][0] <= MOST_BITS}
    for number, (label, curve) in enumerate(shown.items()):
        color, marker = COLORS.get(label) or next(more), MARKERS[number % len(MARKERS)]
        axes.plot(*zip(*curve, strict=True), color=color, marker=marker, ms=5, lw=1.3, label=label)


def _orders(axes: Any, parts: dict[str, dict[str, Curve]]) -> None:
    for way, style in (("without error feedback", "-"), ("with error feedback", "--")):
        for label, curve in parts[way].items():
            said = f"{label}, {way.removesuffix(' error feedback')}"
            color = ORDER_COLORS[label]
            axes.plot(*zip(*curve, strict=True), style, color=color, marker="o", ms=3, lw=1.3, label=f"{said} feedback")


def _frame(axes: Any, least: float, most: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(0.23, 10)
    axes.set_ylim(least, most)
    axes.set_xlabel("measured bits per element")
    axes.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.grid(True, which="major", color="#e5e5e5", lw=0.6)
