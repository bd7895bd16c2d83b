"""Steps of gossip and of what averages with all, over links of a set speed and delay; computing is a sleep."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks._gossip.rank import DDP, LOCAL_STEPS, METHODS
from benchmarks._network.show import FREE, kappa
from benchmarks.harness.lab import Lab
from benchmarks.harness.launch import run_ranks
from benchmarks.harness.results import write
from benchmarks.harness.tables import show


def measure(given: argparse.Namespace) -> None:
    """A cell for each delay: milliseconds and bytes a step, of rank 0; printed, and written to a JSON file.

    Args:
        given: the command line of ``benchmarks.gossip network``.

    Raises:
        ValueError: steps are no multiple of the local ones.
        RuntimeError: this is not Linux with iproute2, or not root; or a rank failed.
    """
    if given.steps < LOCAL_STEPS or given.steps % LOCAL_STEPS:
        raise ValueError(f"--steps {given.steps} must be a multiple of {LOCAL_STEPS}, the local steps of some methods")
    told = {"methods": list(METHODS)} | {name: getattr(given, name) for name in ("numel", "compute_ms", "steps")}
    place, cells = {name: getattr(given, name) for name in ("ranks", "rate", "last")}, []
    for delay in map(float, given.delays.split(",")):
        with Lab(given.ranks, given.rate, delay, given.last) as lab:
            found = run_ranks(lab, told, "benchmarks._gossip.rank")[0]
        cells.append(place | {"delay_ms": delay, **told, **found})
        _show(cells[-1])
        write(given.json, {"cells": cells})


def _show(cell: dict[str, Any]) -> None:
    last = f" (the last {cell['last']})" if cell["last"] else ""
    title = (
        f"{cell['numel']:,} parameters, {cell['ranks']} ranks, {cell['rate']}{last}, "
        f"round trip of {cell['delay_ms']:g} ms (measured {cell['ping_ms']:.1f}); "
        f"computing emulated: a sleep of {cell['compute_ms']:g} ms, nothing beside it"
    ) + kappa(cell["rate"], cell["wire_bytes"][DDP], cell["ms"][FREE])
    rows = (
        (
            name,
            f"{cell['ms'][name]:.1f}",
            f"{cell['ms'][name] - cell['compute_ms']:.1f}",
            f"{cell['wire_bytes'][name] / 1e3:.1f}",
            f"{cell['formula_bytes'][name] / 1e3:.1f}" if name in cell["formula_bytes"] else "",
            f"{cell['averages'][name]:.2f}" if name in cell["averages"] else "",
        )
        for name in cell["methods"]
    )
    head = ("method", "ms a step", "of it not asleep", "kB sent a step", "by formula", "averages")
    show(head, rows, title, width=120)
