"""The map as pictures: every task and link, and four lines for a reader in a hurry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._target.compose import Cell, Entry
from benchmarks._target.methods import AUTO, DENSE, HOOKS
from benchmarks.harness.lab import bits_per_second
from recipes.tables.drawing import canvas, caption, legend, logarithmic, save, speed

WIDTH = 4.6
"""Inches: a telephone shows pictures of this width with letters that can be read."""
REST = "#b0b0b0"
COLORED = {
    DENSE: ("#000000", "DDP"),
    "fp16 hook": ("#8c564b", "PyTorch's fp16 hook"),
    "PowerSGD hook 4": ("#ff7f0e", "PyTorch's PowerSGD hook"),
    "post-local SGD 16": ("#c0509a", "Lightning's post-local SGD"),
    "qsgd 4": ("#1f77b4", "ours: qsgd, 4 bits"),
    "local SGD 8, rotated 4": ("#d62728", "ours: local steps, 4 bits"),
}
"""Methods with a colour, and what the legend calls them."""
GREY = ("accumulation 2, fp16", "sufficient factors", "rotated 4", "onebit", "DiLoCo 30, rotated 4", AUTO)
"""Other methods with a line; the tables have all."""
OURS = "local SGD 8, rotated 4"
SHIPPED = "post-local SGD 16"
"""The methods of the front's lines beside DDP and PyTorch's best hook."""


def draw(maps: dict[str, list[list[Cell]]], title: str, path: Path) -> None:
    """Draw the time to the final target over computing alone; a panel for each task and round trip; a PNG.

    Hollow points missed the target. Below the axis: how many times faster than the best of theirs the best of ours is.

    Args:
        maps: by a task's title, cells of each target.
        title: of all panels.
        path: file to write.

    Raises:
        ValueError: no link was measured.
    """
    panels: dict[tuple[str, float], list[Cell]] = {}
    for task, by_target in maps.items():
        for cell in by_target[-1]:
            panels.setdefault((task, cell.place.delay_ms), []).append(cell)
    if not panels:
        raise ValueError("there is nothing to draw: no link was measured; --part times does it")
    figure, axes = canvas(title, (WIDTH, 3.3 * len(panels) + 1.4), nrows=len(panels), sharey=True)
    for axis, ((task, delay), cells) in zip(axes, panels.items(), strict=True):
        caption(axis, task.replace(" parameters", "") + f"; round trip of {delay:g} ms" * bool(delay))
        _panel(axis, cells)
    axes[-1].set_xlabel("speed of the link in bit/s, and below it:\ntime of the best method that ships over ours")
    figure.supylabel("time to the loss / time to compute alone", fontsize=9)
    legend(figure, *axes, loc="outside lower left", ncols=2, fontsize=8)
    save(figure, path)


def _panel(axis: Any, cells: list[Cell]) -> None:
    for name, (color, label) in COLORED.items():
        _line(axis, cells, name, color, label, 1.8)
    for name in GREY:
        _line(axis, cells, name, REST, "other methods", 1.0)
    logarithmic(axis, {_hertz(cell): f"{speed(_hertz(cell))[:-5]}\n{_factor(cell)}" for cell in cells}, fontsize=7)


def _line(axis: Any, cells: list[Cell], name: str, color: str, label: str, width: float) -> None:
    found = [(_hertz(cell), each) for cell in cells for each in cell.entries if each.method.name == name]
    if found:
        points = [rate for rate, _ in found], [each.over for _, each in found]
        order = 2 + (color != REST)
        style = "-" if found[0][1].method.side == "ours" else "--"
        axis.plot(*points, style, color=color, lw=width, label=label, zorder=order)
        faces = ["white" if each.missed else color for _, each in found]
        axis.scatter(*points, s=14, edgecolors=color, facecolors=faces, zorder=order)


def draw_front(cells: list[Cell], path: Path) -> None:
    """Draw four lines of a task over links without a delay of their own: minutes to the final target; a PNG.

    Args:
        cells: of the final target.
        path: file to write.
    """
    cells = [cell for cell in cells if not cell.place.delay_ms]
    figure, axes = canvas("On slow links, local steps in 4 bits reach the same loss first", (5.8, 3.9))
    rates = [_hertz(cell) for cell in cells]
    lines = {  # colour, width, which point has the label, points from there, and what is drawn
        "DDP": ("#000000", 1.8, 0, (9, 2), [_named(cell, DENSE) for cell in cells]),
        "PyTorch's best hook": ("#ff7f0e", 1.8, 0, (4, -50), [cell.best("theirs", HOOKS) for cell in cells]),
        "post-local SGD": ("#c0509a", 1.8, 0, (-4, 8), [_named(cell, SHIPPED) for cell in cells]),
        "lightning_compress": ("#d62728", 3.2, 0, (16, 3), [_named(cell, OURS) for cell in cells]),
    }
    for label, (color, width, which, shift, found) in lines.items():
        minutes = [each.mean / 60 if each else float("nan") for each in found]
        axes[0].plot(rates, minutes, "-o", color=color, lw=width, ms=4)
        mark = {"color": color, "fontweight": "bold" if width > 2 else "normal", "fontsize": 10 if width > 2 else 9}
        axes[0].annotate(label, (rates[which], minutes[which]), shift, textcoords="offset points", **mark)
    logarithmic(axes[0], {rate: speed(rate) for rate in rates}, fontsize=7)
    axes[0].set_xlim(left=0.8 * min(rates))
    axes[0].set_xlabel("speed of the link between 4 machines")
    axes[0].set_ylabel("minutes of training to DDP's loss")
    save(figure, path)


def _named(cell: Cell, name: str) -> Entry | None:
    return next((each for each in cell.entries if each.method.name == name), None)


def _hertz(cell: Cell) -> float:
    return bits_per_second(cell.place.rate)


def _factor(cell: Cell) -> str:
    factor = cell.factor()
    return f"{factor:.1f} x" if factor else ""
