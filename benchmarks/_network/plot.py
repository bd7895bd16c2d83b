"""Step time against the links' rate and against ranks, a panel each."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks._network.lab import bits_per_second

Cell = dict[str, Any]
LINES = 9
"""In one panel; of more methods those come first that are in ``FIRST``."""
FIRST = (
    "no communication",
    "DDP",
    "PyTorch fp16",
    "PyTorch bf16",
    "PyTorch PowerSGD 1",
    "onebit",
    "rotated",
    "topk 1 %",
    "dgc 0.1 %",
)
COLORS = (
    *("#999999", "#000000", "#7f7f7f", "#8c564b", "#bcbd22", "#1f77b4"),
    *("#9467bd", "#2ca02c", "#d62728", "#ff7f0e", "#17becf"),
)
MARKERS = "xosp^DvP*<>"


def draw(cells: list[Cell], path: Path) -> None:
    """Write the picture, a PNG of 128 colours.

    Args:
        cells: each with ``model``, ``ranks``, ``rate`` and ``ms`` by method, and ``compressor`` where methods are
            exchanges of one; those of the model and the compressor that most are of are drawn.
        path: file to write.

    Raises:
        ValueError: there is nothing to draw a line through.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from PIL import Image

    cells, subject = _subject(cells)
    parts = panels(cells)
    names = shown(list(dict.fromkeys(name for cell in cells for name in cell["ms"])))
    others = [name for name in names if name not in FIRST]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.4 * len(parts) + 1.8, 3.8), layout="constrained", dpi=110)
        axes = figure.subplots(1, len(parts), squeeze=False, sharey=True).flatten()
        for place, (label, against, points) in zip(axes, parts, strict=True):
            place.set_title(label)
            for name in names:
                number = FIRST.index(name) if name in FIRST else len(FIRST) + others.index(name)
                line = sorted((x, cell["ms"][name]) for x, cell in points if name in cell["ms"])
                style = {
                    "color": COLORS[number % len(COLORS)],
                    "marker": MARKERS[number % len(MARKERS)],
                    "ls": "--" if number == 0 else "-",
                }
                place.plot(*zip(*line, strict=True), ms=5, lw=1.4, label=name, **style) if line else None
            _frame(place, against, sorted({x for x, _ in points}))
        axes[0].set_ylabel("median step, ms")
        axes[0].yaxis.set_tick_params(labelleft=True)
        figure.suptitle(subject, fontsize=10)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    Image.open(picture).convert("RGB").quantize(128).save(path, optimize=True)


def shown(names: list[str]) -> list[str]:
    """At most ``LINES`` of the names, those that are compared most first."""
    return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))[:LINES]


def _subject(cells: list[Cell]) -> tuple[list[Cell], str]:
    """The cells of the model and the compressor that most are of, and what they are."""
    (model, compressor), _ = Counter((cell["model"], cell.get("compressor")) for cell in cells).most_common(1)[0]
    own = [cell for cell in cells if (cell["model"], cell.get("compressor")) == (model, compressor)]
    return own, f"{model}, exchanges of {compressor}" if compressor else model


def panels(cells: list[Cell]) -> list[tuple[str, str, list[tuple[float, Cell]]]]:
    """Title, what is against it, and points: where there are most, one of rates and one of ranks.

    Args:
        cells: each with ``ranks`` and ``rate``.

    Raises:
        ValueError: there is nothing to draw a line through.
    """
    limited = [cell for cell in cells if cell["rate"] != "none"]
    found: list[tuple[str, str, list[tuple[float, Cell]]]] = []
    ranks = _most([cell["ranks"] for cell in limited])
    if ranks is not None:
        points = [(bits_per_second(cell["rate"]), cell) for cell in limited if cell["ranks"] == ranks]
        found.append((f"{ranks} ranks", "rate", points))
    rate = _most([cell["rate"] for cell in limited])
    if rate is not None:
        points = [(float(cell["ranks"]), cell) for cell in limited if cell["rate"] == rate]
        found.append((_speed(bits_per_second(rate)), "ranks", points))
    if not found:
        raise ValueError("a plot needs two rates or two numbers of ranks: --rates 100mbit,1gbit or --ranks 2,4")
    return found


def _most(values: list[Any]) -> Any:
    """Which value most cells have, the last of several; None where none has two."""
    counts = Counter(reversed(values))
    value, count = max(counts.items(), key=lambda item: item[1], default=(None, 0))
    return value if count > 1 else None


def _frame(place: Any, against: str, values: list[float]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    place.set_xscale("log", base=10 if against == "rate" else 2)
    place.set_yscale("log")
    place.set_xlabel("rate of each link" if against == "rate" else "ranks")
    place.set_xticks(values, [_speed(each) if against == "rate" else f"{each:g}" for each in values])
    place.xaxis.set_minor_locator(NullLocator())
    place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    place.yaxis.set_minor_locator(NullLocator())
    place.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    place.grid(True, which="both", color="#e5e5e5", lw=0.6)


def _speed(bits: float) -> str:
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
