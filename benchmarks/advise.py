"""What ``lightning-compress advise`` predicts, beside the steps that it predicts.

    sudo python -m benchmarks.advise --json advise.json
    sudo python -m benchmarks.advise --models transformer --rates 300mbit --ranks 2 --measured

A cell is a model, a rate, a number of ranks and a method, over shaped links (see ``benchmarks.network``: Linux, root,
iproute2). ``advise`` is told the parameters, the rate, how long a step takes without communication, and how many cores
a rank has. With ``--measured`` the ranks measure link and codecs, all at once, as ``auto`` does in a run. All methods
are measured in turns, then all again: steps are geometric means of both, the ratio of both is the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._arguments import above_zero, file_to_write, natural, plain_errors, positive, positives
from benchmarks._network.cells import measure
from benchmarks._network.lab import Lab, bits_per_second
from benchmarks._network.launch import run_ranks
from benchmarks._network.models import MODELS
from benchmarks._network.show import FREE
from lightning_compress.commands import advise
from lightning_compress.planning.cost import Link, Speeds

Cell = dict[str, Any]
METHODS = {
    each.name: json.dumps({"compressor": each.compressor}) if each.compressor else "DDP"
    for each in advise.METHODS
    if each.every == 1
}
"""What averages in every step, by its name in the lab."""
WITHOUT_RUN, WITH_RUN, NEAR = 0.25, 0.15, 1.10
"""By what a prediction may be off, without a run and with measurements of one, and what the advice may take of the best
method's time."""


def measure_cell(model: str, rate: str, ranks: int, arguments: argparse.Namespace) -> Cell:
    """Milliseconds of a step by method, measured and predicted, and how much two passes differ."""
    names = [FREE, *METHODS.values()]
    passes = [measure(ranks, rate, model, names, arguments.steps, 1, arguments.warm)["ms"] for _ in range(2)]
    ms = {name: statistics.geometric_mean([found[method] for found in passes]) for name, method in METHODS.items()}
    noise = {
        name: max(found[method] for found in passes) / min(found[method] for found in passes)
        for name, method in METHODS.items()
    }
    compute_ms = statistics.geometric_mean([found[FREE] for found in passes])
    parameters = [(name, tuple(each.shape)) for name, each in MODELS[model][0]().named_parameters()]
    link, speeds = Link(arguments.latency_us * 1e-6, bits_per_second(rate) / 8), None
    if arguments.measured:
        link, speeds = probe(rate, ranks)
    cores = (os.cpu_count() or 1) / ranks
    rows = advise.predicted(parameters, ranks, link, compute_ms, "sgd", min(1.0, cores), speeds)
    predicted = {row.method: row.step_ms for row in rows if row.method in METHODS}
    return {
        "model": model,
        "rate": rate,
        "ranks": ranks,
        "compute_ms": compute_ms,
        "ms": ms,
        "noise": noise,
        "predicted_ms": predicted,
        "advice": advise.best([row for row in rows if row.method in METHODS]).method,
    }


def probe(rate: str, ranks: int) -> tuple[Link, dict[str, Speeds]]:
    """What the ranks of a lab measure of their link and their codecs."""
    with Lab(ranks, rate) as lab:
        compressors = [each.compressor for each in advise.METHODS if each.compressor]
        found = run_ranks(lab, {"compressors": compressors}, "benchmarks._network.probing")[0]
    return Link(**found["link"]), {kind: Speeds(**each) for kind, each in found["speeds"].items()}


def off(cell: Cell) -> dict[str, float]:
    """By what each prediction is off, relative to what was measured."""
    return {name: cell["predicted_ms"][name] / ms - 1 for name, ms in cell["ms"].items()}


def over(cell: Cell) -> float:
    """The advised method's measured step over the fastest one's, of those that keep the loss."""
    lossless = [each.name for each in advise.METHODS if each.name in METHODS and (each.sgd or 0.0) <= advise.NEAR]
    fastest: float = min(cell["ms"][name] for name in lossless)
    advised: float = cell["ms"][cell["advice"]]
    return advised / fastest


def show(cells: list[Cell], within: float) -> None:
    """Print every cell, and how often predictions and advice were near."""
    table = Table(title="milliseconds of a step: measured, predicted / measured")
    for name in ("model", "link", "ranks", *METHODS, "advice", "/ best"):
        table.add_column(name)
    for cell in cells:
        steps = [f"{cell['ms'][name]:.0f}, {1 + share:.2f}" for name, share in off(cell).items()]
        table.add_row(cell["model"], cell["rate"], str(cell["ranks"]), *steps, cell["advice"], f"{over(cell):.2f}")
    Console(width=190).print(table)
    shares = [abs(share) for cell in cells for share in off(cell).values()]
    noise = [ratio for cell in cells for ratio in cell["noise"].values()]
    near = sum(over(cell) <= NEAR for cell in cells)
    print(f"predictions within {100 * within:.0f} %: {sum(each <= within for each in shares)} of {len(shares)}")
    print(f"advice within {100 * (NEAR - 1):.0f} % of the best method: {near} of {len(cells)}")
    print(f"noise: the same method twice differs by {statistics.median(noise):.2f} x, at most {max(noise):.2f} x")


def parse() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="mlp,resnet20,lstm,transformer")
    add("--rates", default="100mbit,300mbit,1gbit")
    add("--ranks", type=positives, default=[2, 4], help="by commas (2,4)")
    add("--steps", type=positive, default=4, help="that count, of each method in each of the two passes")
    add("--warm", type=natural, default=3, help="steps before those")
    add("--latency-us", type=above_zero, default=100.0, help="what advise is told")
    add("--measured", action="store_true", help="the ranks measure link and codecs")
    add("--json", type=file_to_write, help="write the cells here, after each, and go on from what is there")
    arguments = parser.parse_args()
    arguments.models, arguments.rates = arguments.models.split(","), arguments.rates.split(",")
    if unknown := [each for each in arguments.models if each not in MODELS]:
        parser.error(f"--models {unknown[0]} is none of {', '.join(MODELS)}")
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
    wanted = [
        (model, rate, ranks) for model in arguments.models for rate in arguments.rates for ranks in arguments.ranks
    ]
    done = {(cell["model"], cell["rate"], cell["ranks"]) for cell in cells}
    for key in wanted:
        if key not in done:
            cells.append(measure_cell(*key, arguments))
            print(cells[-1], flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(cells, indent=1))
    chosen = [cell for cell in cells if (cell["model"], cell["rate"], cell["ranks"]) in wanted]
    show(chosen, WITH_RUN if arguments.measured else WITHOUT_RUN)


if __name__ == "__main__":
    main()
