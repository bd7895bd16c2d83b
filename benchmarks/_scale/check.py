"""The cost model's predictions beside steps over real links."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed

from benchmarks._network.cells import measure
from benchmarks._network.lab import Lab
from benchmarks._network.launch import run_ranks
from benchmarks._network.models import MODELS
from benchmarks._scale.simulated import SimulatedCollective
from lightning_compress.codecs import Dense
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import AllReduce
from lightning_compress.exchanges.composite import codec_sections
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.choose import THROUGH
from lightning_compress.planning.cost import Link, Speeds, device_seconds, wire_seconds
from lightning_compress.settings.run_state import RunState

SPARSE = {"name": "topk", "density": 0.01}
CHOICES: list[dict[str, Any]] = [
    {"compressor": "fp16", "exchange": "all_reduce"},
    {"compressor": "onebit", "exchange": "all_gather"},
    {"compressor": "onebit", "exchange": "two_shot"},
    {"compressor": "rotated", "exchange": "two_shot"},
    {"compressor": SPARSE, "exchange": "all_gather"},
    {"compressor": SPARSE, "exchange": "split_gather"},
]
FIRST, LATER = 1 << 20, 25 << 20
"""Bytes of DistributedDataParallel's first bucket, and of the others."""
BACKWARD = 2 / 3
"""Of a step's computation."""


def probe(ranks: int, rate: str) -> tuple[Link, dict[str, Speeds]]:
    """What the ranks of a lab measure, all at once.

    Raises:
        RuntimeError: one of them failed; carries what it wrote.
    """
    with Lab(ranks, rate) as lab:
        codecs = ["none", "fp16", "onebit", "rotated", SPARSE]
        found = run_ranks(lab, {"codecs": codecs}, "benchmarks._scale.probing")[0]
    return Link(**found["link"]), {name: Speeds(**each) for name, each in found["speeds"].items()}


def buckets(model: str) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of the parameters, as DistributedDataParallel puts them together."""
    parameters = list(reversed(list(MODELS[model][0]().named_parameters())))
    assign = distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    parts, _ = assign([each for _, each in parameters], [FIRST, LATER])
    return [[(parameters[place][0], tuple(parameters[place][1].shape)) for place in part] for part in parts]


def predict(
    choice: dict[str, Any] | None, model: str, ranks: int, link: Link, speeds: dict[str, Speeds], computing_s: float
) -> float:
    """Seconds of a step; of plain DistributedDataParallel without a choice."""
    cpu, collective = torch.device("cpu"), SimulatedCollective(ranks)
    copy_s = speeds["none"].decode_s
    parts = buckets(model)
    total = sum(Layout.of(part).numel for part in parts)
    settings = RunState.of(**choice) if choice else None
    costs = []
    for part in parts:
        numel = Layout.of(part).numel
        backward_s = computing_s * BACKWARD * numel / total
        if settings is None or choice is None:
            plan = AllReduce().plan([Section(Dense(), Layout.of(part), 0)], World(collective, cpu, Meter(cpu)))
            costs.append((backward_s, 0.0, wire_seconds(plan.cost, link)))  # it sends its buckets as they are
            continue
        chosen = codec_sections(settings.rules.sections(part)[1])
        sections = [replace(each, fed_back=settings.feeds_back(each.method)) for each in chosen]
        plan = settings.exchange.plan(sections, World(collective, cpu, Meter(cpu)))
        given = str(choice["compressor"])
        work = [(each.layout.numel, speeds["none" if isinstance(each.codec, Dense) else given]) for each in sections]
        device_s = device_seconds(plan.cost, work, copy_s) + (0 if plan.in_place else THROUGH * copy_s * numel)
        costs.append((backward_s, device_s, wire_seconds(plan.cost, link)))
    return computing_s * (1 - BACKWARD) + backward_seconds(costs)


def backward_seconds(buckets: Sequence[tuple[float, float, float]]) -> float:
    """Time from the beginning of backward, beside which messages travel, until all means are there.

    Args:
        buckets: of each in its order, seconds of backward until it is ready after the one before, seconds that the
            device encodes and decodes it, seconds that it travels.
    """
    computed = arrived = 0.0
    for backward_s, device_s, wire_s in buckets:
        computed += backward_s + device_s
        arrived = max(arrived, computed) + wire_s  # one after the other; what comes last has nothing to hide behind
    return max(computed, arrived)


def compare(ranks: int, rate: str, model: str, steps: int) -> dict[str, Any]:
    """Measured and predicted milliseconds, by method."""
    names = {json.dumps(choice): choice for choice in CHOICES}
    methods = ["no communication", "DDP", *names]
    measured = measure(ranks=ranks, rate=rate, model=model, methods=methods, steps=steps, rounds=1)["ms"]
    link, speeds = probe(ranks, rate)
    computing_s = measured["no communication"] / 1e3
    predicted = {
        name: 1e3 * predict(names.get(name), model, ranks, link, speeds, computing_s) for name in ["DDP", *names]
    }
    return {
        "measured_ms": measured,
        "predicted_ms": predicted,
        "link": str(link),
        "speeds": {name: vars(each) for name, each in speeds.items()},
    }


def show(figures: dict[str, Any], title: str) -> None:
    """Print a table."""
    table = Table("method", "measured ms", "predicted ms", "predicted / measured", title=title, caption=figures["link"])
    measured = figures["measured_ms"]
    table.add_row("no communication", f"{measured['no communication']:.1f}", "", "")
    for name, value in figures["predicted_ms"].items():
        table.add_row(name, f"{measured[name]:.1f}", f"{value:.1f}", f"{value / measured[name]:.2f}")
    Console(width=120).print(table)
