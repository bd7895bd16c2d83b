"""Error against bits: one column for each model, all methods above, the orders of FFT below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.tables.drawing import canvas, caption, save, styles

Curve = list[tuple[float, float]]
"""Measured bits per element, relative error."""
ORDER_COLORS = {"as is": "#d62728", "transposed": "#1f77b4", "permuted": "#2ca02c", "per parameter": "#9467bd"}
MOST_BITS = 10
"""Methods that send more (casts) would make the rest small; the tables have them."""
TITLES = {"resnet": "ResNet-20, CIFAR-10", "lstm": "character LSTM, Multi30k"}


def draw(figures: dict[str, dict[str, dict[str, Curve]]], path: Path) -> None:
    """Write the picture, a PNG.

    Args:
        figures: by model: "methods", "without error feedback" and "with error feedback", each by label.
        path: file to write.
    """
    columns = len(figures)
    figure, axes = canvas(
        point(figures), (4.7 * columns + 2.4, 9.0), columns, nrows=2, sharex="row", sharey="row", height_ratios=(3, 2)
    )
    for (model, parts), above, below in zip(figures.items(), axes[:columns], axes[columns:], strict=True):
        caption(above, f"{TITLES.get(model, model)}: one gradient, without error feedback")
        _methods(above, parts["methods"])
        caption(below, "sum of ten gradients, coarse fft, by order of elements")
        _orders(below, parts)
        _frame(above, 0.005, 1.7)
        _frame(below, 0.005, 1.1)
    for first, last in ((axes[0], axes[columns - 1]), (axes[columns], axes[-1])):
        first.set_ylabel("relative error")
        last.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
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
    axes.plot(
        bits, [2.0**-each for each in bits], color="#cccccc", lw=4, zorder=0, label="$2^{-bits}$, normal data's least"
    )
    shown = {label: curve for label, curve in curves.items() if curve[0][0] <= MOST_BITS}
    for label, style in styles(shown).items():
        axes.plot(*zip(*shown[label], strict=True), ms=5, lw=1.3, label=label, **style)


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
