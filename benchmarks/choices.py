"""What ``exchange="auto"`` chooses over many links and worlds, beside every plan that it could have chosen, measured.

    sudo python -m benchmarks.choices --json choices.json
    sudo python -m benchmarks.choices --models mlp,resnet20 --rates 1gbit --ranks 2,4 --compressors onebit

A cell is a model, a rate, a number of ranks and a compressor; plans take turns over shaped links (see
``benchmarks.network``: Linux, root, iproute2). DistributedDataParallel is one of the plans; where its bytes alone take
longer than ``--patience`` it is not run, and stands in the tables with what its bytes take, which is a lower bound.

All plans are measured, then all again: figures are geometric means of both, and the ratio of both says what noise is. A
choice that is the best plan counts as 1.00 x of it. What ``auto`` predicts for its own choice, computing as long as a
step without communication, stands beside what its step took. Cells that are in the JSON already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks._arguments import (
    above_zero,
    described,
    file_to_write,
    natural,
    plain_errors,
    positive,
    positives,
    some_of,
)
from benchmarks._network.choosing import AUTO, COMPRESSORS, DDP, Cell, best, chosen, measure_cell, over
from benchmarks.harness import tables
from benchmarks.harness.lab import bits_per_second
from benchmarks.harness.models import MODELS
from benchmarks.harness.results import write

NEAR, SLOWER, CLOSE = 1.10, 1.05, 0.20
"""What a choice may take of the best plan's time, and of DistributedDataParallel's; by what a prediction may be off."""


def show(cells: list[Cell]) -> None:
    """Print every cell, and what the issue is: how often the choice is near the best, and how far from DDP."""
    plans, rows = list(dict.fromkeys(name for cell in cells for name in cell["ms"] if name not in (AUTO, DDP))), []
    for cell in cells:
        ms = cell["ms"]
        label = f"{cell['model']}, {cell['rate']}, {cell['ranks']}, {cell['compressor']}"
        dense = f"{'> ' if DDP in cell['bounds'] else ''}{ms[DDP]:.1f}"
        others = [f"{ms[name]:.1f}" if name in ms else "" for name in plans]
        ratios = [f"{over(cell, plan):.2f}" for plan in (best(cell), DDP)]
        also = f"{max(cell['noise'].values()):.2f}", f"{cell['predicted_ms']:.1f}"
        rows.append((label, dense, *others, chosen(cell), f"{ms[AUTO]:.1f}", *ratios, *also))
    head = ["cell", DDP, *plans, "chosen", AUTO, "/ best", "/ DDP", "noise", "predicted"]
    title = "milliseconds of a step; >: its bytes alone take so long"
    tables.show(head, rows, title, width=170, firm=("cell", "chosen"))
    near, against = [over(cell, best(cell)) for cell in cells], [over(cell, DDP) for cell in cells]
    noise = [ratio for cell in cells for ratio in cell["noise"].values()]
    off = [abs(cell["predicted_ms"] / cell["ms"][AUTO] - 1) for cell in cells]
    winners = sorted({best(cell) for cell in cells})
    print(f"{len(cells)} cells; {sum(each <= NEAR for each in near)} choices within {NEAR:.2f} x of the best plan")
    print(f"{sum(each <= SLOWER for each in against)} within {SLOWER:.2f} x of DDP, at most {max(against):.2f} x")
    print(f"plans that win somewhere: {', '.join(winners)}")
    print(f"noise: the same plan twice differs by {statistics.median(noise):.2f} x, at most {max(noise):.2f} x")
    print(
        f"predictions within {CLOSE:.0%}: {sum(each <= CLOSE for each in off)} of {len(cells)} cells".replace("%", " %")
    )


def parse() -> argparse.Namespace:
    """The command line, checked."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--models", type=some_of(MODELS), default=list(MODELS), help=f"of {', '.join(MODELS)}, by commas")
    add("--rates", default="100mbit,300mbit,1gbit,3gbit,10gbit")
    add("--ranks", type=positives, default=[2, 4, 8], help="by commas (2,4,8)")
    add("--compressors", type=some_of(COMPRESSORS), default=["topk"], help=f"of {', '.join(COMPRESSORS)}, by commas")
    add("--steps", type=positive, default=3, help="that count, of each plan in each of the two passes")
    add("--warm", type=natural, default=3, help="steps before those")
    add(
        "--patience",
        type=above_zero,
        default=4.0,
        help="seconds that the bytes of a step of DDP may take for it to be run",
    )
    add("--json", type=file_to_write, help="write the cells here, after each, and go on from what is there")
    arguments = parser.parse_args()
    arguments.rates = arguments.rates.split(",")
    try:
        for rate in arguments.rates:
            bits_per_second(rate)
    except ValueError as error:
        parser.error(str(error))
    return arguments


@plain_errors()
def main() -> None:
    """Measure what is missing, and print the table."""
    arguments = parse()
    cells: list[Cell] = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else []
    keys = ("model", "ranks", "rate", "compressor")
    cells = [cell for cell in cells if "noise" in cell]  # others were measured once
    done = {tuple(cell[key] for key in keys) for cell in cells}
    wanted = [
        (model, ranks, rate, compressor)
        for compressor in arguments.compressors
        for model in arguments.models
        for ranks in arguments.ranks
        for rate in arguments.rates
    ]
    for key in wanted:
        if key not in done:
            cells.append(measure_cell(*key, arguments))
            print(cells[-1], flush=True)
            write(arguments.json, cells)
    cells = [cell for cell in cells if tuple(cell[key] for key in keys) in wanted]
    show(cells)


if __name__ == "__main__":
    main()
