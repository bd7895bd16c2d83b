"""What each method keeps in memory, in bytes per parameter: beside parameters, gradients and the optimizer's state.

    python -m benchmarks.memory --ranks 2

Eight layers of 1024 x 1024 in buckets of two, three steps, as threads of one process; afterwards every tensor and array
that is alive is counted once. "State" is what has to be saved (the residual, velocities, ...), in two buffers; "work"
is messages and scratch; ``residual_dtype="bfloat16"`` beside it. ``none`` leaves all to DistributedDataParallel: 0.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_compress.collectives import Collective, run_threads
from lightning_compress.compression import Compression
from lightning_compress.exchanges import Auto
from lightning_compress.settings import COMPRESSORS, Settings

WIDTH, LAYERS, PER_BUCKET = 1024, 8, 2


def alive() -> dict[int, int]:
    """Bytes of each block of memory that some tensor or array holds, by its address."""
    blocks: dict[int, int] = {}
    for each in _reachable():
        if issubclass(type(each), Tensor):  # isinstance wakes modules up that warn
            storage = cast(Tensor, each).untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
        elif issubclass(type(each), np.ndarray):
            array = cast("np.ndarray[Any, Any]", each)
            blocks |= {array.ctypes.data: array.nbytes} if array.base is None else {}
    return blocks


def _reachable() -> Iterator[object]:
    for each in gc.get_objects():
        yield each
        yield from gc.get_referents(each)


def measure(compressor: str, dtype: str, ranks: int) -> tuple[float, float]:
    """Bytes per parameter of state, and of work."""
    gc.collect()
    before = alive()
    found: list[tuple[int, int]] = []

    def train(collective: Collective) -> None:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        parameters = [layer.weight for layer in layers]
        settings = Settings.of(compressor, Auto(fallback="never"), residual_dtype=dtype, check_drift_every=0)
        compression = Compression(nn.Sequential(*layers), settings, collective)
        optimizer = torch.optim.SGD(parameters, 1e-3)
        for _ in range(3):
            for start in range(0, LAYERS, PER_BUCKET):
                bucket = parameters[start : start + PER_BUCKET]
                for parameter in bucket:
                    parameter.grad = torch.randn_like(parameter)
                compression.reduce(bucket, [each.grad.view(-1) for each in bucket if each.grad is not None])
            optimizer.step()
        optimizer.zero_grad()
        done = torch.zeros(1)
        collective.all_reduce(done)  # all ranks are here
        if collective.rank == 0:
            blocks = {place: size for place, size in alive().items() if place not in before}
            kept = [each for state in compression.groups.states() for each in (state.committed, state.pending)]
            state = sum(each.numel() * each.element_size() for each in kept)
            weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
            found.append((state, sum(blocks.values()) // ranks - state - weights))
        collective.all_reduce(done)
        compression.close()

    run_threads(ranks, train)
    numel = LAYERS * WIDTH * WIDTH
    return found[0][0] / numel, found[0][1] / numel


def main() -> None:
    """Measure every method and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    everything = ",".join(each for each in COMPRESSORS if each not in ("auto", "none"))
    parser.add_argument("--compressors", default=everything, help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    columns = ("method", "state", "work", "state, bfloat16", "work, bfloat16")
    table = Table(*columns, title=f"bytes per parameter, {arguments.ranks} ranks")
    figures = {}
    for name in arguments.compressors.split(","):
        found = [*measure(name, "float32", arguments.ranks), *measure(name, "bfloat16", arguments.ranks)]
        figures[name] = dict(zip(columns[1:], found, strict=True))
        table.add_row(name, *(f"{value:.1f}" for value in found))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
