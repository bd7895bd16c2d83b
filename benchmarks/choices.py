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
import re
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._arguments import above_zero, file_to_write, natural, plain_errors, positive, positives
from benchmarks._network.cells import measure
from benchmarks._network.plot import draw, panels
from benchmarks._network.show import FREE
from benchmarks.harness.lab import bits_per_second
from benchmarks.harness.models import MODELS
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.planning.predict import BACKWARD, Bucket, backward_seconds

Cell = dict[str, Any]
AUTO, DDP = "auto", "DDP"
COMPRESSORS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "topk": ({"name": "topk", "density": 0.01}, ("all_gather", "split_gather")),
    "onebit": ("onebit", ("all_gather", "two_shot")),
    "rotated": ("rotated", ("all_gather", "two_shot")),
    "bf16": ("bf16", ("all_reduce",)),
}
"""By name: the arguments, and the exchanges that ``auto`` chooses between for its like."""
NEAR, SLOWER, CLOSE = 1.10, 1.05, 0.20
"""What a choice may take of the best plan's time, and of DistributedDataParallel's; by what a prediction may be off."""
PREDICTED = re.compile(r"for (\d+) elements, ([\d.]+) ms by the cost model, ([\d.]+) of them computing")


def measure_cell(model: str, ranks: int, rate: str, compressor: str, arguments: argparse.Namespace) -> Cell:
    """Milliseconds by plan, their noise, which are lower bounds, and what ``auto`` said and predicts."""
    given, exchanges = COMPRESSORS[compressor]
    chooses = {"name": "auto", "fallback": "dense"}  # also float32
    plans = {
        name: json.dumps({"compressor": given, "exchange": chooses if name == AUTO else name})
        for name in (*exchanges, AUTO)
        if name != "two_shot" or ranks > 2
    }
    elements = sum(each.numel() for each in MODELS[model][0]().parameters())
    least_s = all_reduce_bytes(4 * elements, ranks) * 8 / bits_per_second(rate)
    plans |= {DDP: DDP} if least_s <= arguments.patience else {}
    names = [FREE, *plans.values()]
    passes = [measure(ranks, rate, model, names, arguments.steps, 1, arguments.warm) for _ in range(2)]
    pairs = {name: [found["ms"][method] for found in passes] for name, method in plans.items()}
    ms = {name: statistics.geometric_mean(pair) for name, pair in pairs.items()}
    computing_ms = statistics.geometric_mean([found["ms"][FREE] for found in passes])
    said = passes[1]["said"].get(plans[AUTO], [])
    return {
        "model": model,
        "ranks": ranks,
        "rate": rate,
        "compressor": compressor,
        "ms": ms | {DDP: ms.get(DDP, 1e3 * least_s)},
        "noise": {name: max(pair) / min(pair) for name, pair in pairs.items()},
        "bounds": [] if DDP in ms else [DDP],
        "said": said,
        "predicted_ms": predicted_ms(said, elements, computing_ms),
    }


def predicted_ms(said: list[str], elements: int, computing_ms: float) -> float:
    """A step by the cost model, whose groups, in the order of backward, are exchanged beside it one after the other.

    Args:
        said: by ``auto``, a line for each of its groups, and perhaps for those of the first step before them.
        elements: of the model.
        computing_ms: a step without communication.
    """
    groups: list[tuple[int, float, float]] = []
    for line in reversed(said):
        match = PREDICTED.search(line)
        if match and sum(numel for numel, *_ in groups) < elements:
            groups.insert(0, (int(match[1]), float(match[2]), float(match[3])))
    backward_ms = computing_ms * BACKWARD
    costs = [
        Bucket(backward_ms * numel / elements, device_ms, max(0.0, exchange_ms - device_ms))
        for numel, exchange_ms, device_ms in groups
    ]
    return computing_ms - backward_ms + backward_seconds(costs)


def best(cell: Cell) -> str:
    """The plan of a fixed kind that took least."""
    fixed: dict[str, float] = {name: ms for name, ms in cell["ms"].items() if name != AUTO}
    return min(fixed, key=fixed.__getitem__)


def over(cell: Cell, plan: str) -> float:
    """How many times as long as this plan ``auto`` took; 1 where it chose this plan, of float32 DDP's."""
    if chosen(cell) == {DDP: "float32"}.get(plan, plan):
        return 1.0
    ratio: float = cell["ms"][AUTO] / cell["ms"][plan]
    return ratio


def chosen(cell: Cell) -> str:
    """What ``auto`` took, of its groups each once."""
    kinds = ("all_gather", "split_gather", "two_shot", "all_reduce")
    said = [next((kind for kind in kinds if line.startswith(kind)), "?") for line in cell["said"]]
    names = ["float32" if "float32, since" in line else kind for line, kind in zip(cell["said"], said, strict=True)]
    return " + ".join(dict.fromkeys(names))


def show(cells: list[Cell]) -> None:
    """Print every cell, and what the issue is: how often the choice is near the best, and how far from DDP."""
    table = Table(title="milliseconds of a step; >: its bytes alone take so long")
    plans = list(dict.fromkeys(name for cell in cells for name in cell["ms"] if name not in (AUTO, DDP)))
    names = ["cell", DDP, *plans, "chosen", AUTO, "/ best", "/ DDP", "noise", "predicted"]
    for name in names:
        table.add_column(name, no_wrap=name in ("cell", "chosen"))
    for cell in cells:
        ms = cell["ms"]
        label = f"{cell['model']}, {cell['rate']}, {cell['ranks']}, {cell['compressor']}"
        dense = f"{'> ' if DDP in cell['bounds'] else ''}{ms[DDP]:.1f}"
        others = [f"{ms[name]:.1f}" if name in ms else "" for name in plans]
        ratios = [f"{over(cell, plan):.2f}" for plan in (best(cell), DDP)]
        also = f"{max(cell['noise'].values()):.2f}", f"{cell['predicted_ms']:.1f}"
        table.add_row(label, dense, *others, chosen(cell), f"{ms[AUTO]:.1f}", *ratios, *also)
    Console(width=170).print(table)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default=",".join(MODELS))
    add("--rates", default="100mbit,300mbit,1gbit,3gbit,10gbit")
    add("--ranks", type=positives, default=[2, 4, 8], help="by commas (2,4,8)")
    add("--compressors", default="topk", help=f"of {', '.join(COMPRESSORS)}, by commas")
    add("--steps", type=positive, default=3, help="that count, of each plan in each of the two passes")
    add("--warm", type=natural, default=3, help="steps before those")
    add(
        "--patience",
        type=above_zero,
        default=4.0,
        help="seconds that the bytes of a step of DDP may take for it to be run",
    )
    add("--plot", type=file_to_write, help="draw step time against rate and ranks, a PNG")
    add("--json", type=file_to_write, help="write the cells here, after each, and go on from what is there")
    arguments = parser.parse_args()
    for name, known in (("models", MODELS), ("compressors", COMPRESSORS)):
        setattr(arguments, name, getattr(arguments, name).split(","))
        if unknown := [each for each in getattr(arguments, name) if each not in known]:
            parser.error(f"--{name} {unknown[0]} is none of {', '.join(known)}")
    arguments.rates = arguments.rates.split(",")
    try:
        for rate in arguments.rates:
            bits_per_second(rate)
        if arguments.plot:
            panels([{"ranks": ranks, "rate": rate} for ranks in arguments.ranks for rate in arguments.rates])
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
            if arguments.json:
                arguments.json.write_text(json.dumps(cells, indent=1))
    cells = [cell for cell in cells if tuple(cell[key] for key in keys) in wanted]
    show(cells)
    if arguments.plot:
        draw(cells, arguments.plot)


if __name__ == "__main__":
    main()
