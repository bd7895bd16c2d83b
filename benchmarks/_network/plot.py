"""Step time against the links' rate and against ranks, a panel each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness.lab import bits_per_second
from recipes.tables.drawing import canvas, caption, legend, logarithmic, save, speed, styles

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
    "qsgd",
    "rotated",
    "topk 1 %",
    "dgc 0.1 %",
)


def draw(cells: list[Cell], path: Path) -> None:
    """Write the picture, a PNG.

    Args:
        cells: of one model, each with ``model``, ``ranks``, ``rate`` and ``ms`` by method.
        path: file to write.

    Raises:
        ValueError: there is nothing to draw a line through.
    """
    parts = panels(cells)
    names = shown(list(dict.fromkeys(name for cell in cells for name in cell["ms"])))
    figure, axes = canvas(point(parts), (4.6 * len(parts) + 2.2, 4.0), len(parts), sharey=True)
    for place, (label, against, points) in zip(axes, parts, strict=True):
        caption(place, f"{cells[0]['model']}, {label}")
        for name, style in styles(names).items():
            line = sorted((x, cell["ms"][name]) for x, cell in points if name in cell["ms"])
            drawn = style | {"ls": "--" if name == "no communication" else "-", "ms": 5, "lw": 1.4, "label": name}
            place.plot(*zip(*line, strict=True), **drawn) if line else None
        place.set_xlabel("rate of each link" if against == "rate" else "ranks")
        at = {x: speed(x) if against == "rate" else f"{x:g}" for x, _ in points}
        logarithmic(place, at, 10 if against == "rate" else 2)
    axes[0].set_ylabel("median step, ms")
    axes[0].yaxis.set_tick_params(labelleft=True)
    legend(figure, *axes)
    save(figure, path)


def point(parts: list[tuple[str, str, list[tuple[float, Cell]]]]) -> str:
    """Return how many times as fast as DDP the most exact fast method is, at both ends of the first panel."""
    _, against, points = parts[0]
    ends = [cell["ms"] for _, cell in sorted(points, key=lambda point: point[0])]
    ends = [ends[0], ends[-1]]
    ours = next((name for name in ("qsgd", "rotated", "onebit", *ends[0]) if all(name in ms for ms in ends)), "")
    if not ours or any("DDP" not in ms for ms in ends):
        return "Step time"
    at = [speed(x) if against == "rate" else f"{x:g} ranks" for x in sorted(x for x, _ in points)]
    low, high = (ms["DDP"] / ms[ours] for ms in ends)
    return f"A step with {ours} is {low:.1f} x as fast as DDP's at {at[0]}, {high:.1f} x at {at[-1]}"


def shown(names: list[str]) -> list[str]:
    """At most ``LINES`` of the names, those that are compared most first."""
    return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))[:LINES]


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
        found.append((speed(bits_per_second(rate)), "ranks", points))
    if not found:
        raise ValueError("a plot needs two rates or two numbers of ranks: --rates 100mbit,1gbit or --ranks 2,4")
    return found


def _most(values: list[Any]) -> Any:
    """Which value most cells have, the last of several; None where none has two."""
    counts = Counter(reversed(values))
    value, count = max(counts.items(), key=lambda item: item[1], default=(None, 0))
    return value if count > 1 else None
