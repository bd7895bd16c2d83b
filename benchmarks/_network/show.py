"""Tables of what the lab found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from benchmarks._network.methods import ALONE
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
    medians, numel = cell["ms"], cell.get("numel") or _parameters(cell["model"])
    sent = cell["wire_bytes"].get("DDP") or all_reduce_bytes(4 * numel, cell["ranks"])
    computing_ms = medians.get(FREE, medians.get(ALONE))
    if cell["rate"] != "none" and computing_ms:
        said += f", kappa {8e3 * sent / bits_per_second(cell['rate']) / computing_ms:.2g}"
    return f"{said}; {cell['how']}" if "how" in cell else said


def _parameters(model: str) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in MODELS[model][0]().parameters())


def show(found: dict[str, Any], said: str, base: str = "DDP") -> None:
    """Print a table of one cell: ``ms`` and ``wire_bytes`` by method, and whatever else there is.

    Args:
        found: the cell.
        said: the title.
        base: the method that all are compared with.
    """
    medians, sent = found["ms"], found["wire_bytes"]
    kinds = ("formula_bytes", "bits", "step_bits", "averages", "late", "real")
    formula, bits, step_bits, averages, late, real = (found.get(each, {}) for each in kinds)
    free = medians.get(FREE, medians.get(ALONE))
    references = [each for name, each in medians.items() if name.startswith("PyTorch")]
    columns: dict[str, Callable[[str], str]] = {
        "method": lambda name: name,
        "ms": lambda name: f"{medians[name]:.1f}",
        "/ no comm.": lambda name: _ratio(medians[name], free),
        f"{base} / it": lambda name: _ratio(medians.get(base), medians[name]),
        "best hook / it": lambda name: _ratio(min(references, default=None), medians[name]),
        "MB sent": lambda name: f"{sent[name] / 1e6:.3f}",
        "/ formula": lambda name: f"{sent[name] / formula[name]:.3f}" if formula.get(name) else "",
        "bits": lambda name: f"{bits[name]:.3f}" if name in bits else "",
        "bits a step": lambda name: f"{step_bits[name]:.5f}" if name in step_bits else "",
        "averages": lambda name: f"{averages[name]:.2f}" if name in averages else "",
        "late": lambda name: f"{100 * late[name]:.1f} %" if name in late else "",
        "real ms": lambda name: f"{real[name]:.1f}" if name in real else "",
        "error": lambda name: f"{100 * (medians[name] / real[name] - 1):+.0f} %" if name in real else "",
    }
    rows = [[cell(name) for cell in columns.values()] for name in medians]
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    head = [list(columns)[place] for place in kept]
    caption = CAPTION if references or bits or step_bits else None
    show_table(head, [[row[place] for place in kept] for row in rows], said, caption, width=_width(), words=1)


def _width() -> int:
    console = Console()
    return console.width if console.is_terminal else WIDTH


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f} x" if above and below else ""
