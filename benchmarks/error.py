"""What each compressor leaves behind of real gradients: at several sizes of them, and against the bits it sends.

    python -m benchmarks.error --root data --json docs/results/error.json --plot docs/error_vs_bits.png

Gradients of ten successive steps of ResNet-20 on CIFAR-10 and of a character LSTM on Multi30k (see
``benchmarks.gradients``). Gradients of larger models are smaller, and Adam does not care how small they are: so they
are also tried at a thousandth and a hundred-thousandth of their size. Bits are measured, of the messages themselves.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks._arguments import described, file_to_write, natural, plain_errors
from benchmarks._plot import Curve, draw
from benchmarks._sweeps import ORDERS, Step, sweep
from benchmarks.gradients import FOLDERS, captured
from benchmarks.harness.results import write
from benchmarks.harness.tables import show
from lightning_compress import compare
from lightning_compress.comparison import Row

SCALES = (1.0, 1e-3, 1e-5)
COUNT = 10


def show_scales(model: str, steps: list[Step]) -> None:
    """Print of each method with its defaults: bits per element, and the error at each scale."""
    sizes = [
        compare([{name: each * scale for name, each in step.items()} for step in steps], error_feedback=False).rows
        for scale in SCALES
    ]
    rows = (
        (row.compressor, f"{row.bits:.2f}", *(f"{100 * each.error:.2g} %" for each in (row, *others)))
        for row, *others in zip(*sizes, strict=True)
    )
    show(("compressor", "bits", *(f"gradient x {scale:g}" for scale in SCALES)), rows, f"{model}: relative error")


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


def show_curves(title: str, curves: dict[str, Curve]) -> None:
    """Print a row for each curve: error at bits, point after point."""
    points = {label: (f"{100 * error:.3g} % at {bits:.2f}" for bits, error in curve) for label, curve in curves.items()}
    show(("", "error at bits per element"), ((label, "   ".join(each)) for label, each in points.items()), title)


@plain_errors()
def main() -> None:
    """Print the tables and draw the plot."""
    parser = described(__doc__)
    parser.add_argument("--root", type=Path, required=True, help=f"folder that holds {', '.join(FOLDERS.values())}")
    parser.add_argument("--models", nargs="+", choices=FOLDERS, default=["resnet", "lstm"])
    parser.add_argument("--after", type=natural, default=60, help="steps before the gradients are taken (at most 69)")
    parser.add_argument("--json", type=file_to_write, help="write the figures here")
    parser.add_argument("--plot", type=file_to_write, help="draw error against bits into this file")
    arguments = parser.parse_args()
    figures = {}
    for model in arguments.models:
        steps = captured(model, arguments.root, arguments.after, COUNT)
        figures[model] = {"methods": methods(steps), **orders(steps)}
        show_scales(model, steps)
        for part, curves in figures[model].items():
            show_curves(f"{model}: {part}", curves)
        write(arguments.json, figures)
        if arguments.plot:
            draw(figures, arguments.plot)


if __name__ == "__main__":
    main()
