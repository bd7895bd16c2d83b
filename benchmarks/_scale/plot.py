"""Time and bytes against the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.tables.drawing import amounts, canvas, caption, legend, save, styles

LINES = {"two_shot": "-", "split_gather": "-", "all_gather": "--", "hierarchical": ":"}


def draw(found: Mapping[str, Mapping[int, Any]], title: str, path: Path) -> None:
    """Write the picture, a PNG.

    Args:
        found: by way and ranks: ``seconds``, ``card_bytes`` and ``bytes_sent``.
        title: of what.
        path: file to write.
    """
    figure, (left, right) = canvas(point(found), (11.4, 4.8), 2)
    for name, style in styles(found).items():
        figures = found[name]
        line = style | {"ls": LINES.get(name.partition(", ")[2], "-"), "ms": 4, "lw": 1.4, "label": name}
        left.plot(list(figures), [each.seconds for each in figures.values()], **line)
        right.plot(list(figures), [each.card_bytes or None for each in figures.values()], **line)
    caption(left, f"predicted, {title}")
    left.set_ylabel("time of one exchange, s")
    caption(right, "counted")
    right.set_ylabel("sent by a node's network card")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    amounts(right.yaxis)
    legend(figure, left, right)
    save(figure, path)


def point(found: Mapping[str, Mapping[int, Any]]) -> str:
    """Return what takes the least time at a middle number of ranks, beside float32."""
    if "dense" not in found:
        return "Predicted time of one exchange, and its bytes"
    ranks = sorted(set.intersection(*(set(figures) for figures in found.values())))
    middle = ranks[len(ranks) // 2]
    seconds = {name: figures[middle].seconds for name, figures in found.items()}
    best = min(seconds, key=seconds.__getitem__)
    return f"On {middle} ranks {best} takes {seconds['dense'] / seconds[best]:.1f} x less time than float32 (predicted)"
