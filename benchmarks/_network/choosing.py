"""One cell of benchmarks.choices: every plan measured, what auto chose, and what it predicted."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from typing import Any

from benchmarks._network.cells import measure
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
    told = {"model": model, "methods": names, "steps": arguments.steps, "rounds": 1, "warm": arguments.warm}
    passes = [measure(ranks, rate, **told) for _ in range(2)]
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
