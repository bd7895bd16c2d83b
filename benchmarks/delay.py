"""What a delay of one step gains in time, and what it costs in loss, on processes of this machine.

    python -m benchmarks.delay --ranks 2 --steps 300 --seeds 5

Step time: a step's computing is a sleep, and so is its exchange, beside a real average of a small network; nothing of
the exchange hides behind backward. Loss: that of all digits after so many steps of an MLP, SGD with a momentum of 0.9
and a rate that falls to 0, mean of the seeds. Real steps over links of a rate:
``benchmarks.network --set delay``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._arguments import above_zero, file_to_write, positive
from benchmarks._digits import digits
from benchmarks.harness.launch import run_beside
from lightning_compress import Compression, attach

METHODS: dict[str, Any] = {
    "float32": "none",
    "bf16": "bf16",
    "rotated": "rotated",
    "onebit": "onebit",
    "topk 1 %": {"name": "topk", "density": 0.01},
    "dgc 1 %": {"name": "dgc", "density": 0.01},
}
RATES = (0.01, 0.03, 0.1)
BATCH, TIMED, WARM = 16, 20, 3


def network(seed: int) -> nn.Module:
    """An MLP for digits, equal on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def begin(module: nn.Module, method: str, delay: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The wrapped model, its optimizer, and what averages."""
    model, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), rate, momentum=0.9)
    # without a hook, float32 would not be slowed
    given = {"on_nonfinite": "skip"} if method == "float32" else {"schedule": "none"}
    return model, optimizer, attach(model, METHODS[method], delay=delay, optimizer=optimizer, **given)  # type: ignore[arg-type]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """One step of training."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


def step_ms(method: str, delay: int, computing_s: float, exchange_s: float) -> float:
    """Median milliseconds of a step."""
    reduce, times = Compression.reduce, []

    def slow(*arguments: Any) -> None:
        time.sleep(exchange_s)
        reduce(*arguments)

    images, labels = (each[:BATCH] for each in digits())
    with mock.patch.object(Compression, "reduce", slow):
        model, optimizer, compression = begin(network(0), method, delay, RATES[0])
        for _ in range(WARM + TIMED):
            start = time.perf_counter()
            time.sleep(computing_s)
            step(model, optimizer, images, labels)
            times.append(1e3 * (time.perf_counter() - start))
        compression.close()
    return statistics.median(times[WARM:])


def loss(method: str, delay: int, rate: float, steps: int, seed: int) -> float:
    """Loss of all digits after so many steps."""
    images, labels = digits()
    module, drawn = network(seed), torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    model, optimizer, compression = begin(module, method, delay, rate)
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - number / steps)
        places = torch.randint(len(labels), (BATCH,), generator=drawn)
        step(model, optimizer, images[places], labels[places])
    compression.close()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(images), labels))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure on one rank: ``ms`` by method and delay, and ``loss``, by learning rate as well."""
    logging.getLogger("lightning_compress").setLevel(logging.WARNING)
    seconds = given.computing_ms / 1e3, given.exchange_ms / 1e3
    times = {method: [step_ms(method, delay, *seconds) for delay in (0, 1)] for method in ("float32", "rotated")}
    losses: dict[str, list[dict[float, float]]] = {method: [{}, {}] for method in METHODS}
    for method, delay, rate in itertools.product(METHODS, (0, 1), RATES):
        runs = [loss(method, delay, rate, given.steps, seed) for seed in range(given.seeds)]
        losses[method][delay][rate] = statistics.mean(runs)
    return {"ms": times, "loss": losses}


def main() -> None:
    """Run the ranks and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--computing-ms", type=above_zero, default=100.0)
    parser.add_argument("--exchange-ms", type=above_zero, default=80.0)
    parser.add_argument("--json", type=file_to_write, help="write the figures here")
    given = parser.parse_args()
    found = run_beside(given.ranks, measure, given)[0]
    title = f"computing {given.computing_ms:g} ms, exchange {given.exchange_ms:g} ms, {given.ranks} ranks"
    table = Table("method", "delay 0", "delay 1", "step over computing, 0 and 1", "faster", title=title)
    for method, (now, late) in found["ms"].items():
        over = f"{now / given.computing_ms:.2f}, {late / given.computing_ms:.2f}"
        table.add_row(method, f"{now:.1f} ms", f"{late:.1f} ms", over, f"{now / late:.2f} x")
    Console().print(table)
    title = f"loss after {given.steps} steps, by learning rate, {given.ranks} ranks, mean of {given.seeds} seeds"
    table = Table("method", "delay", *map(str, RATES), title=title)
    for method, delays in found["loss"].items():
        for delay, by_rate in enumerate(delays):
            table.add_row(method, str(delay), *(f"{value:.4f}" for value in by_rate.values()))
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
