"""Time and bytes against the number of ranks."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLORS = {"dense": "#000000", "fp16": "#7f7f7f", "onebit": "#8c564b", "rotated": "#1f77b4", "topk": "#2ca02c"}
STYLES = {"two_shot": "-", "split_gather": "-", "all_gather": "--", "hierarchical": ":"}


def draw(found: Mapping[str, Mapping[int, Any]], title: str, path: Path) -> None:
    """Write the picture, a PNG of 128 colours.

    Args:
        found: by way and ranks: ``seconds``, ``card_bytes`` and ``bytes_sent``.
        title: of what.
        path: file to write.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from PIL import Image

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11.0, 4.6), layout="constrained", dpi=100)
        left, right = figure.subplots(1, 2)
        for name, figures in found.items():
            word, _, way = name.partition(", ")
            style = {"color": COLORS[word.split()[0]], "ls": STYLES.get(way, "-"), "marker": "o", "ms": 3, "lw": 1.4}
            left.plot(list(figures), [1e3 * each.seconds for each in figures.values()], label=name, **style)
            sent = [each.card_bytes / 1e6 or None for each in figures.values()]
            right.plot(list(figures), sent, label=name, **style)
        left.set_title("predicted time of one exchange, ms")
        right.set_title("sent by a node's network card, MB")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("ranks")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.grid(True, which="major", color="#e5e5e5", lw=0.6)
        right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        figure.suptitle(title)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    Image.open(picture).convert("RGB").quantize(128).save(path, optimize=True)
