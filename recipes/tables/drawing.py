"""One style for all pictures: a title that says the point, one colour for each method, marks that differ, units."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

COLORS = {
    "dense": "#000000",
    "ddp": "#000000",
    "none": "#000000",
    "no": "#999999",
    "pytorch": "#7f7f7f",
    "fp16": "#7f7f7f",
    "bf16": "#393b79",
    "rotated": "#1f77b4",
    "qsgd": "#17becf",
    "onebit": "#8c564b",
    "efsign": "#e377c2",
    "onebit_adam": "#f5a623",
    "topk": "#2ca02c",
    "dgc": "#637939",
    "fft": "#d62728",
    "dct": "#ff7f0e",
    "powersgd": "#e6550d",
    "range_float": "#9467bd",
    "terngrad": "#bcbd22",
    "local": "#0f8b8d",
}
"""By the first word of a label."""
OTHERS = ("#7b4173", "#31a354", "#756bb1", "#c7b100", "#5254a3", "#b5838d", "#843c39")
MARKERS = "os^DvPX<>phd8*H"
RC: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return colour and mark of each label: a method has one colour, and no two labels have the same mark and colour.

    Args:
        labels: such as "topk 1 %", "PyTorch fp16".
    """
    more, seen, found = iter(OTHERS * 9), dict[str, str](), dict[str, dict[str, Any]]()
    for number, label in enumerate(labels):
        method = label.replace(",", " ").split()[0].lower()
        again = method in seen
        seen.setdefault(method, COLORS.get(method) or next(more))
        face = {"markerfacecolor": "white"} if again else {}
        found[label] = {"color": seen[method], "marker": MARKERS[number % len(MARKERS)], **face}
    return found


def canvas(title: str, size: tuple[float, float], panels: int = 1, **subplots: Any) -> tuple[Any, list[Any]]:
    """Return a figure, and its axes in reading order.

    Args:
        title: what the reader should see, in a sentence.
        size: width and height in inches.
        panels: columns.
        subplots: arguments of ``Figure.subplots``, such as ``nrows``.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(RC):
        figure = Figure(figsize=size, layout="constrained", dpi=110)
        axes = figure.subplots(ncols=panels, squeeze=False, **subplots).flatten().tolist()
        title = textwrap.fill(title.replace(" x ", "\xa0x "), int(11 * size[0]))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for each in axes:
        each.grid(True, color="#e5e5e5", lw=0.6)
        each.set_axisbelow(True)
    return figure, axes


def caption(axes: Any, text: str) -> None:
    """Write above the axes what they show."""
    axes.set_title(text, fontsize=9, loc="left")


def legend(figure: Any, *axes: Any, **more: Any) -> None:
    """Name all lines of the axes beside them, each once."""
    known = {text: line for each in axes for line, text in zip(*each.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), **{"loc": "outside right center", "frameon": False, **more})


def logarithmic(axes: Any, ticks: Mapping[float, str], base: float = 10, **text: Any) -> None:
    """Let both axes be logarithmic.

    Args:
        axes: of a panel.
        ticks: of the one below, and what is written there; the other has 1, 2 and 5 times powers of ten.
        base: of the one below.
        text: how its ticks are written.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()), **text)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())


def amounts(axis: Any) -> None:
    """Write the numbers of an axis as bytes, kB, MB and so on."""
    axis.set_major_formatter(lambda value, _: amount(value))


def amount(size: float) -> str:
    """Return a number of bytes with its unit."""
    units = iter(("bytes", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 1000 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{size:g} {unit}"


def speed(bits: float) -> str:
    """Return the speed of a link of so many bits a second, with its unit."""
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def image(figure: Any) -> Any:
    """Return a figure as an image of PIL."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    return Image.open(drawn).convert("RGB")


def save(figure: Any, path: Path) -> None:
    """Write a figure as a PNG of 256 colours, rare ones too."""
    from PIL.Image import Quantize

    path.parent.mkdir(parents=True, exist_ok=True)
    image(figure).quantize(256, Quantize.MAXCOVERAGE).save(path, optimize=True)
