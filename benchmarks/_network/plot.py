"""Step time against the links' rate, a panel for each number of ranks, and against ranks, a panel for each rate."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from benchmarks._network.lab import bits_per_second

Cell = dict[str, Any]
LINES = 8
"""In one panel; of more methods those come first that are in ``FIRST``."""
FIRST = (
    "no communication",
    "DDP",
    "PyTorch fp16",
    "PyTorch PowerSGD 1",
    "onebit",
    "rotated",
    "topk 1 %",
    "dgc 0.1 %",
)
COLORS = ("#999999", "#000000", "#7f7f7f", "#bcbd22", "#1f77b4", "#9467bd", "#2ca02c", "#d62728", "#ff7f0e", "#17becf")
MARKERS = "xos^DvP*<>"


def draw(cells: list[Cell], path: Path) -> None:
    """Write the picture, a PNG of 128 colours.

    Args:
        cells: each with ``model``, ``ranks``, ``rate`` and ``ms`` by method.
        path: file to write.

    Raises:
        ValueError: there is nothing to draw a line through.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from PIL import Image

    panels = _panels(cells)
    names = shown(list(dict.fromkeys(name for cell in cells for name in cell["ms"])))
    wide = max(len(panels) // -(-len(panels) // 3), 1)
    high = -(-len(panels) // wide)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3.8 * wide + 1.8, 3.4 * high), layout="constrained", dpi=110)
        axes = figure.subplots(high, wide, squeeze=False, sharey=True).flatten()
        for place, (label, against, points) in zip(axes, panels, strict=False):
            place.set_title(label)
            for number, name in enumerate(names):
                line = sorted((x, cell["ms"][name]) for x, cell in points if name in cell["ms"])
                style = {"color": COLORS[number], "marker": MARKERS[number], "ls": "--" if number == 0 else "-"}
                place.plot(*zip(*line, strict=True), ms=5, lw=1.4, label=name, **style) if line else None
            _frame(place, against, sorted({x for x, _ in points}))
        for place in axes[len(panels) :]:
            place.set_visible(False)
        figure.supylabel("median step, milliseconds", fontsize=9)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    Image.open(picture).convert("RGB").quantize(128).save(path, optimize=True)


def shown(names: list[str]) -> list[str]:
    """At most ``LINES`` of the names, those that are compared most first."""
    return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))[:LINES]


def _panels(cells: list[Cell]) -> list[tuple[str, str, list[tuple[float, Cell]]]]:
    """Title, what is against it, and points: those with at least two values of it."""
    limited = [cell for cell in cells if cell["rate"] != "none"]
    panels = []
    for model, ranks in dict.fromkeys((cell["model"], cell["ranks"]) for cell in limited):
        points = [(bits_per_second(cell["rate"]), cell) for cell in limited if _is(cell, model, ranks=ranks)]
        panels.append((f"{model}, {ranks} ranks", "rate", points))
    for model, rate in dict.fromkeys((cell["model"], cell["rate"]) for cell in cells):
        points = [(float(cell["ranks"]), cell) for cell in cells if _is(cell, model, rate=rate)]
        panels.append((f"{model}, {rate}", "ranks", points))
    panels = [panel for panel in panels if len({x for x, _ in panel[2]}) > 1]
    if not panels:
        raise ValueError("a plot needs two rates or two numbers of ranks: --rates 100mbit,1gbit or --ranks 2,4")
    return panels


def _is(cell: Cell, model: str, **wanted: Any) -> bool:
    return cell["model"] == model and all(cell[key] == value for key, value in wanted.items())


def _frame(place: Any, against: str, values: list[float]) -> None:
    place.set_xscale("log", base=10 if against == "rate" else 2)
    place.set_yscale("log")
    place.set_xlabel("rate of each link" if against == "rate" else "ranks")
    place.set_xticks(values, [_speed(each) if against == "rate" else f"{each:g}" for each in values])
    place.minorticks_off()
    place.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    place.grid(True, which="both", color="#e5e5e5", lw=0.6)


def _speed(bits: float) -> str:
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
