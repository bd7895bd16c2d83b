"""Tables of what the lab found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from benchmarks._network.methods import ALONE, PAPER
from benchmarks.harness.lab import bits_per_second
from benchmarks.harness.models import MODELS
from benchmarks.harness.tables import show as show_table
from lightning_compress.collectives.counting import all_reduce_bytes

FREE = "no communication"
CAPTION = "best hook: of PyTorch's. bits: of a message, per element encoded; a step: sent, per parameter of the model"
WIDTH = 120
"""Where there is no terminal that says how wide it is."""


def title(cell: dict[str, Any]) -> str:
    """What was measured where."""
    said = f"{cell['model']}, {cell['ranks']} ranks, {cell['rate']}"
    said += f", round trip {cell['ping_ms']:.2f} ms" if cell.get("ping_ms") else ""
    medians = cell["ms"]
    sent = cell["wire_bytes"].get("DDP") or all_reduce_bytes(4 * _parameters(cell["model"]), cell["ranks"])
    said += kappa(cell["rate"], sent, medians.get(FREE, medians.get(ALONE)))
    return f"{said}; {cell['how']}" if "how" in cell else said


def kappa(rate: str, sent: float, computing_ms: float | None) -> str:
    """What a title says of the time that DDP's messages take on a link, over that of a step's computing.

    Args:
        rate: of the link; "none": not limited.
        sent: bytes that a rank sends in a step of DDP.
        computing_ms: a step without communication; None: it was not measured.

    Returns:
        ``", kappa 3.2"``; nothing where the rate or the step is not known.
    """
    if rate == "none" or not computing_ms:
        return ""
    return f", kappa {8e3 * sent / bits_per_second(rate) / computing_ms:.2g}"


def _parameters(model: str) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in MODELS[model][0]().parameters())


def show(found: dict[str, Any], said: str) -> None:
    """Print a table of one cell: ``ms`` and ``wire_bytes`` by method, and whatever else there is."""
    medians, sent = found["ms"], found["wire_bytes"]
    kinds = ("formula_bytes", "bits", "step_bits", "late", "real")
    formula, bits, step_bits, late, real = (found.get(each, {}) for each in kinds)
    free = medians.get(FREE, medians.get(ALONE))
    references = [each for name, each in medians.items() if name.startswith("PyTorch")]
    columns: dict[str, Callable[[str], str]] = {
        "method": lambda name: name,
        "ms": lambda name: f"{medians[name]:.1f}",
        "/ no comm.": lambda name: _ratio(medians[name], free),
        "DDP / it": lambda name: _ratio(medians.get("DDP"), medians[name]),
        "best hook / it": lambda name: _ratio(min(references, default=None), medians[name]),
        "MB sent": lambda name: f"{sent[name] / 1e6:.3f}",
        "/ formula": lambda name: f"{sent[name] / formula[name]:.3f}" if formula.get(name) else "",
        "bits": lambda name: f"{bits[name]:.3f}" if name in bits else "",
        "bits a step": lambda name: f"{step_bits[name]:.5f}" if name in step_bits else "",
        "late": lambda name: f"{100 * late[name]:.1f} %" if name in late else "",
        "real ms": lambda name: f"{real[name]:.1f}" if name in real else "",
        "error": lambda name: f"{100 * (medians[name] / real[name] - 1):+.0f} %" if name in real else "",
    }
    rows = [[cell(name) for cell in columns.values()] for name in medians]
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    head = [list(columns)[place] for place in kept]
    show_table(head, [[row[place] for place in kept] for row in rows], said, CAPTION, width=_width(), words=1)


def _width() -> int:
    console = Console()
    return console.width if console.is_terminal else WIDTH


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f} x" if above and below else ""


def show_paper(cells: list[dict[str, Any]]) -> None:
    """Print by what factor each fft is faster than what it was run with, a column for each cell, and the paper's."""
    cells = [cell for cell in cells if any(name.startswith("fft, ") for name in cell["ms"])]
    rows = []
    for name in dict.fromkeys(name for cell in cells for name in cell["ms"]):
        family, _, which = name.partition(", ")
        if family in PAPER:
            own = next(fft for cell in cells for fft in cell["ms"] if fft.startswith(f"fft, {which}"))
            ratios = (_ratio(cell["ms"].get(name), cell["ms"].get(own)) for cell in cells)
            rows.append((name, *ratios, f"{PAPER[family]} x"))
    if rows:
        head = ("fft against", *(f"{cell['ranks']} ranks, {cell['rate']}" for cell in cells), "in the paper")
        show_table(head, rows, "not comparable in absolute terms", width=_width())
