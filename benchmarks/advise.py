"""What ``lightning-compress advise`` predicts, beside the steps that it predicts.

    sudo python -m benchmarks.advise --json advise.json
    sudo python -m benchmarks.advise --models transformer --rates 300mbit --ranks 2

A cell is a model and a place: a rate and a number of ranks, over shaped links (see ``benchmarks.network``: Linux, root,
iproute2). ``advise`` is told the parameters, the rate, how long a step takes without communication, and the cores of a
rank; then also what the ranks measured of their link and their codecs. All methods are measured in turns, then all
again: steps are geometric means of both, the ratio of both is the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._arguments import above_zero, file_to_write, natural, plain_errors, positive, positives
from benchmarks._network.cells import measure
from benchmarks._network.show import FREE
from benchmarks.harness.lab import Lab, bits_per_second
from benchmarks.harness.launch import run_ranks
from benchmarks.harness.models import MODELS
from lightning_compress.commands import advise
from lightning_compress.planning.cost import Link, Speeds

Cell = dict[str, Any]
METHODS = {
    each.name: json.dumps({"compressor": each.compressor}) if each.compressor else "DDP"
    for each in advise.METHODS
    if each.every == 1
}
"""What averages in every step, by its name in the lab."""
TOLD, MEASURED = "without a run", "with link and codecs measured"
WITHIN, NEAR = {TOLD: 0.25, MEASURED: 0.15}, 1.10
"""By what a prediction may be off, and what the advice may take of the best method's time."""


def measure_cell(model: str, rate: str, ranks: int, arguments: argparse.Namespace) -> Cell:
    """Milliseconds of a step by method, and how much two passes differ."""
    names = [FREE, *METHODS.values()]
    passes = [measure(ranks, rate, model, names, arguments.steps, 1, arguments.warm)["ms"] for _ in range(2)]
    ms = {name: statistics.geometric_mean([found[method] for found in passes]) for name, method in METHODS.items()}
    noise = {
        name: max(found[method] for found in passes) / min(found[method] for found in passes)
        for name, method in METHODS.items()
    }
    return {
        "model": model,
        "rate": rate,
        "ranks": ranks,
        "cores": min(1.0, (os.cpu_count() or 1) / ranks),
        "compute_ms": statistics.geometric_mean([found[FREE] for found in passes]),
        "ms": ms,
        "noise": noise,
    }


def predict_cell(cell: Cell, place: Cell, latency_us: float) -> Cell:
    """``predicted``, the milliseconds of a step by method, and ``advice``, by what ``advise`` was told."""
    parameters = [(name, tuple(each.shape)) for name, each in MODELS[cell["model"]][0]().named_parameters()]
    link = advise.link_of(bits_per_second(cell["rate"]) / 1e9, latency_us)
    known = {name: Speeds(**each) for name, each in place["speeds"].items()}
    told: dict[str, Any] = {TOLD: (link, None), MEASURED: (Link(**place["link"]), known)}
    found: Cell = {"predicted": {}, "advice": {}}
    for way, (link, speeds) in told.items():
        rows = advise.predicted(parameters, cell["ranks"], link, cell["compute_ms"], "sgd", cell["cores"], speeds)
        averaging = [row for row in rows if row.method in METHODS]
        found["predicted"][way] = {row.method: row.step_ms for row in averaging}
        found["advice"][way] = advise.best(averaging).method
    return cell | found


def measure_place(rate: str, ranks: int) -> Cell:
    """What the ranks measure of their link and their codecs, all at once, as ``auto`` does in a run."""
    with Lab(ranks, rate) as lab:
        compressors = [each.compressor for each in advise.METHODS if each.compressor]
        found = run_ranks(lab, {"compressors": compressors}, "benchmarks._network.probing")[0]
    return {"rate": rate, "ranks": ranks, **found}


def off(cell: Cell, way: str) -> dict[str, float]:
    """By what each prediction is off, relative to what was measured."""
    return {name: cell["predicted"][way][name] / ms - 1 for name, ms in cell["ms"].items()}


def over(cell: Cell, way: str) -> float:
    """The advised method's measured step over the fastest one's, of those that keep the loss."""
    lossless = [each.name for each in advise.METHODS if each.name in METHODS and (each.sgd or 0.0) <= advise.NEAR]
    fastest: float = min(cell["ms"][name] for name in lossless)
    advised: float = cell["ms"][cell["advice"][way]]
    return advised / fastest


def show(cells: list[Cell]) -> None:
    """Print every cell, and how often predictions and advice were near."""
    noise = [ratio for cell in cells for ratio in cell["noise"].values()]
    for way, within in WITHIN.items():
        table = Table(title=f"milliseconds of a step: measured, predicted / measured ({way})")
        for name in ("model", "link", "ranks", "computing", *METHODS, "advice", "/ best"):
            table.add_column(name)
        for cell in cells:
            steps = [f"{cell['ms'][name]:.0f}, {1 + share:.2f}" for name, share in off(cell, way).items()]
            place = (cell["model"], cell["rate"], str(cell["ranks"]), f"{cell['compute_ms']:.0f}")
            table.add_row(*place, *steps, cell["advice"][way], f"{over(cell, way):.2f}")
        Console(width=190).print(table)
        shares = [abs(share) for cell in cells for share in off(cell, way).values()]
        near = sum(over(cell, way) <= NEAR for cell in cells)
        print(f"predictions within {100 * within:.0f} %: {sum(each <= within for each in shares)} of {len(shares)}")
        print(f"advice within {100 * (NEAR - 1):.0f} % of the best method: {near} of {len(cells)}\n")
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
    known: dict[str, list[Cell]] = {"places": [], "cells": []}
    if arguments.json and arguments.json.exists():
        known = json.loads(arguments.json.read_text())

    def found(kind: str, key: Cell, how: Callable[[], Cell]) -> Cell:
        for each in known[kind]:
            if all(each[name] == value for name, value in key.items()):
                return each
        known[kind].append(how())
        print(known[kind][-1], flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(known, indent=1))
        return known[kind][-1]

    cells = []
    for rate, ranks in product(arguments.rates, arguments.ranks):
        place = found("places", {"rate": rate, "ranks": ranks}, partial(measure_place, rate, ranks))
        for model in arguments.models:
            how = partial(measure_cell, model, rate, ranks, arguments)
            cell = found("cells", {"model": model, "rate": rate, "ranks": ranks}, how)
            cells.append(predict_cell(cell, place, arguments.latency_us))
    show(cells)


if __name__ == "__main__":
    main()
