"""What each compressor leaves behind of real gradients: at several sizes of them, and against the bits it sends.

    python -m benchmarks.error --root data --plot docs/error_vs_bits.png

Gradients of ten successive steps of ResNet-20 on CIFAR-10 and of a character LSTM on Multi30k (see
``benchmarks.gradients``). Gradients of larger models are smaller, and Adam does not care how small they are: so they
are also tried at a thousandth and a hundred-thousandth of their size. Bits are measured, of the messages themselves.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._arguments import file_to_write, natural, plain_errors
from benchmarks._plot import Curve, draw
from benchmarks._sweeps import ORDERS, Step, sweep
from benchmarks.gradients import FOLDERS, captured
from lightning_compress import compare
from lightning_compress.comparison import Row

SCALES = (1.0, 1e-3, 1e-5)
COUNT = 10


def scale_table(model: str, steps: list[Step]) -> Table:
    """Of each method with its defaults: bits per element, and the error at each scale."""
    table = Table(
        "compressor", "bits", *(f"gradient x {scale:g}" for scale in SCALES), title=f"{model}: relative error"
    )
    sizes = [
        compare([{name: each * scale for name, each in step.items()} for step in steps], error_feedback=False).rows
        for scale in SCALES
    ]
    for row, *others in zip(*sizes, strict=True):
        errors = (f"{100 * each.error:.2g} %" for each in (row, *others))
        table.add_row(row.compressor, f"{row.bits:.2f}", *errors)
    return table


def methods(steps: list[Step]) -> dict[str, Curve]:
    """Every method's error on single gradients."""
    return {
        label: [(row.bits, row.error) for row in compare(steps, family, error_feedback=False).rows]
        for label, family in sweep().items()
    }


def orders(steps: list[Step], family: str = "fft, coarse") -> dict[str, dict[str, Curve]]:
    """The error of the sum of all steps, without and with error feedback, by the order of the elements."""
    settings = sweep()[family]
    figures: dict[str, dict[str, Curve]] = {}
    for label, feedback in (("without", False), ("with", True)):
        curves = {
            name: [
                (row.bits, row.sum_error) for row in compare([order(step) for step in steps], settings, feedback).rows
            ]
            for name, order in ORDERS.items()
        }
        curves["per parameter"] = each_parameter(steps, settings, feedback)
        figures[f"{label} error feedback"] = curves
    return figures


def each_parameter(steps: list[Step], settings: list[dict[str, Any]], feedback: bool) -> Curve:
    """The error of the sum of all steps, where every parameter is a vector of its own."""
    parts: list[tuple[int, float, tuple[Row, ...]]] = []
    for name in compare(steps[:1], ["none"]).parameters:
        result = compare([{name: step[name]} for step in steps], settings, feedback)
        norm = float(sum(step[name].double() for step in steps).norm())  # type: ignore[union-attr]
        parts.append((result.numel, norm, result.rows))
    total, length = math.hypot(*(norm for _, norm, _ in parts)), sum(numel for numel, _, _ in parts)
    return [
        (
            sum(numel * rows[place].bits for numel, _, rows in parts) / length,
            math.hypot(*(norm * rows[place].sum_error for _, norm, rows in parts)) / total,
        )
        for place in range(len(settings))
    ]


def curves_table(title: str, curves: dict[str, Curve]) -> Table:
    """A row for each curve: error at bits, point after point."""
    table = Table("", "error at bits per element", title=title)
    for label, curve in curves.items():
        table.add_row(label, "   ".join(f"{100 * error:.3g} % at {bits:.2f}" for bits, error in curve))
    return table


@plain_errors()
def main() -> None:
    """Print the tables and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help=f"folder that holds {', '.join(FOLDERS.values())}")
    parser.add_argument("--models", nargs="+", choices=FOLDERS, default=list(FOLDERS))
    parser.add_argument("--after", type=natural, default=60, help="steps before the gradients are taken (at most 69)")
    parser.add_argument("--json", type=file_to_write, help="write the figures here")
    parser.add_argument("--plot", type=file_to_write, help="draw error against bits into this file")
    arguments = parser.parse_args()
    console, figures = Console(), {}
    for model in arguments.models:
        steps = captured(model, arguments.root, arguments.after, COUNT)
        figures[model] = {"methods": methods(steps), **orders(steps)}
        console.print(scale_table(model, steps))
        for part, curves in figures[model].items():
            console.print(curves_table(f"{model}: {part}", curves))
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2))
        if arguments.plot:
            draw(figures, arguments.plot)


if __name__ == "__main__":
    main()
