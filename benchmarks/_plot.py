"""Error against bits: a panel of all methods for each model, then one of the orders of FFT for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.tables.drawing import canvas, caption, save

Curve = list[tuple[float, float]]
"""Measured bits per element, relative error."""
ORDER_COLORS = {"as is": "#d62728", "transposed": "#1f77b4", "permuted": "#2ca02c", "per parameter": "#9467bd"}
NAMED = {
    "rotated": "#1f77b4",
    "qsgd": "#17becf",
    "fft, coarse": "#d62728",
    "topk, 1 bit in Rice codes": "#2ca02c",
    "onebit": "#8c564b",
}
"""Methods with a colour: those to choose from. The others are grey, and the tables have them."""
MOST_BITS = 10
"""Methods that send more (casts) would make the rest small; the tables have them."""
TITLES = {"resnet": "ResNet-20, CIFAR-10", "lstm": "character LSTM, Multi30k"}


def draw(figures: dict[str, dict[str, dict[str, Curve]]], path: Path) -> None:
    """Write the picture, a PNG.

    Args:
        figures: by model: "methods", "without error feedback" and "with error feedback", each by label.
        path: file to write.
    """
    count = len(figures)
    figure, axes = canvas(point(figures), (4.6, 3.4 * 2 * count + 1.6), nrows=2 * count)  # the width of a telephone
    for (model, parts), above, below in zip(figures.items(), axes[:count], axes[count:], strict=True):
        title = TITLES.get(model, model)
        caption(above, f"{title}: one gradient")
        _methods(above, parts["methods"])
        caption(below, f"{title}: sum of ten, coarse fft, by order")
        _orders(below, parts)
        _frame(above, 0.005, 1.7)
        _frame(below, 0.005, 1.1)
        above.set_ylabel("relative error")
        below.set_ylabel("relative error")
    for last in (axes[count - 1], axes[-1]):
        last.legend(loc="lower left", frameon=False, fontsize=7)
    save(figure, path)


def point(figures: dict[str, dict[str, dict[str, Curve]]]) -> str:
    """Return which method has the smallest error near 4 bits, by model."""
    best = []
    for model, parts in figures.items():
        near = [
            (error, label) for label, curve in parts["methods"].items() for bits, error in curve if 3.5 <= bits <= 4.5
        ]
        if near:
            best.append(f"{min(near)[1]} on the {TITLES.get(model, model).partition(',')[0]}")
    return f"Smallest error at 4 bits: {'; '.join(best)}" if best else "Error against bits"


def _methods(axes: Any, curves: dict[str, Curve]) -> None:
    bits = [0.25 * 1.1**power for power in range(38)]
    axes.plot(bits, [2.0**-each for each in bits], color="#cccccc", lw=4, zorder=0, label="normal data's least")
    shown = {label: curve for label, curve in curves.items() if curve[0][0] <= MOST_BITS}
    for label, curve in shown.items():
        if label not in NAMED:
            axes.plot(*zip(*curve, strict=True), "-o", ms=2, lw=0.9, color="#b0b0b0")
    for label, color in NAMED.items():
        if label in shown:
            axes.plot(*zip(*shown[label], strict=True), "-o", ms=4, lw=1.8, color=color, label=label)
    axes.plot([], [], "-o", ms=2, lw=0.9, color="#b0b0b0", label="other methods")


def _orders(axes: Any, parts: dict[str, dict[str, Curve]]) -> None:
    for way, style in (("without error feedback", "-"), ("with error feedback", "--")):
        for label, curve in parts[way].items():
            said = f"{label}, {way.removesuffix(' error feedback')}"
            mark = {"color": ORDER_COLORS[label], "marker": "os^D"[list(ORDER_COLORS).index(label)], "ms": 4}
            axes.plot(*zip(*curve, strict=True), style, lw=1.3, label=f"{said} feedback", **mark)


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
