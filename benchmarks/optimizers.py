"""Which compressor goes with which optimizer: a character LSTM on real text, 2 ranks, the same seeds for every method.

    python -m benchmarks.optimizers --root data --json optimizers.json
    python -m benchmarks.optimizers --root data --json optimizers.json --methods dense onebit --optimizers adamw
    python -m benchmarks.optimizers --root data --json optimizers.json --tune --seeds 0

The model reads 16 excerpts of 64 characters of the English captions of Multi30k a rank and step; the learning rate
falls linearly to 0. It is each optimizer's best for dense averaging among those in RATES (``--tune`` trains them all),
and no method has one of its own. A run takes half a minute on two idle cores. Runs that the JSON file has already are
not repeated, so that it may be interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks._language import CharLSTM, Text, excerpts, read_text
from lightning_compress import attach
from lightning_compress.exchanges import Auto
from lightning_compress.settings import Settings

METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "bf16": {"compressor": "bf16"},
    "range_float 8 bits": {"compressor": {"name": "range_float", "bits": 8}},
    "natural": {"compressor": "natural"},
    "rotated 5 bits": {"compressor": {"name": "rotated", "bits": 5}},
    "rotated 4 bits": {"compressor": {"name": "rotated", "bits": 4}},
    "qsgd 4 bits": {"compressor": {"name": "qsgd", "bits": 4}},
    "topk 10 %": {"compressor": {"name": "topk", "density": 0.1}},
    "fft 85 %": {"compressor": {"name": "fft", "theta": 0.85}},
    "terngrad": {"compressor": "terngrad"},
    "onebit": {"compressor": "onebit"},
    "efsign": {"compressor": "efsign"},
    "powersgd": {"compressor": "powersgd"},
    "topk 1 %": {"compressor": {"name": "topk", "density": 0.01}},
    "topk 1 %, warm-up": {
        "compressor": {"name": "topk", "density": 0.01},
        "schedule": {"density": {0: 0.25, 60: 0.0625, 120: 0.01}},
    },
    "dgc 1 %": {"compressor": {"name": "dgc", "density": 0.01}, "warmup_steps": 20},
    "onebit_adam": {"compressor": {"name": "onebit_adam", "freeze_steps": 60}},
}
"""Arguments of ``attach``; those of which there is no compressor are passed over."""
ONLY = {"dgc 1 %": "sgd", "onebit_adam": "adamw"}
"""Methods that take over a part of one kind of optimizer's work, and refuse others."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, rate),
    "onebit_adam": lambda parameters, rate: torch.optim.SGD(parameters, rate, weight_decay=0.01),  # is Adam itself
}
RATES = {"sgd": (0.1, 0.2, 0.5, 1.0, 2.0), "adamw": (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)}
BEST = {"sgd": 1.0, "adamw": 1e-2}
"""Dense, seed 0, held-out loss at each of RATES: 1.967, 1.754, 1.501, 1.369, 1.368 for SGD (of two equal ones, the
smaller), and 1.796, 1.591, 1.333, 1.205, 1.265 for AdamW."""
RANKS, BATCH, LENGTH, LAST = 2, 16, 64, 20

Run = dict[str, Any]
"""``name`` (the key of its result), ``method``, ``optimizer``, ``rate``, ``seed``, ``steps``."""


def train(run: Run, text: Text) -> dict[str, float]:
    """One run, on this rank: held-out loss, training loss of the last 20 steps, how many times fewer bytes, seconds."""
    start = time.perf_counter()
    torch.manual_seed(run["seed"])
    model = CharLSTM(text.vocabulary)
    ddp = DistributedDataParallel(model)
    compression = attach(ddp, exchange=Auto(fallback="never"), **METHODS[run["method"]], seed=run["seed"])
    optimizer = OPTIMIZERS.get(run["method"], OPTIMIZERS[run["optimizer"]])(model.parameters(), run["rate"])
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, run["steps"])
    generator = torch.Generator().manual_seed(1000 * run["seed"] + dist.get_rank())
    losses = []
    for _ in range(run["steps"]):
        optimizer.zero_grad()
        loss = ddp(excerpts(text.train, BATCH, LENGTH, generator))
        loss.backward()
        optimizer.step()
        falling.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-LAST:]).mean()
    dist.all_reduce(last)
    stats = compression.stats()
    compression.close()
    return {
        "held_out": held_out_loss(model, text.held_out),
        "training": float(last) / dist.get_world_size(),
        "ratio": stats["total_bytes_dense"] / stats["total_bytes_sent"],
        "seconds": time.perf_counter() - start,
    }


@torch.no_grad()
def held_out_loss(model: CharLSTM, text: Tensor) -> float:
    """Mean loss on half of the held-out text, cut into excerpts of 128 characters."""
    length = 128
    rows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)[::2]
    return float(model(rows))


def work(rank: int, runs: list[Run], root: Path, results: Path, store: str) -> None:
    """All runs, one after the other, on one rank; rank 0 writes down each result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    text = read_text(root)
    for number, run in enumerate(runs):
        figures = train(run, text)
        if rank == 0:
            results.write_text(json.dumps(read_results(results) | {run["name"]: figures}, indent=2))
            said = f"held-out loss {figures['held_out']:.3f}, {figures['seconds']:.0f} s"
            print(f"{number + 1}/{len(runs)} {run['name']}: {said}", flush=True)
    dist.destroy_process_group()


def read_results(path: Path) -> dict[str, dict[str, float]]:
    """The results so far."""
    return json.loads(path.read_text()) if path.exists() else {}


def known(method: str) -> bool:
    """Whether there is such a compressor."""
    try:
        Settings.of(**METHODS[method])
    except ValueError as error:
        if "unknown compressor" in str(error):
            return False
        raise
    return True


def named(method: str, optimizer: str, rate: float, seed: int, steps: int) -> Run:
    """A run, by the name that the results have for it."""
    name = f"{optimizer} {rate:g}/{method}/seed {seed}/{steps} steps"
    return {"name": name, "method": method, "optimizer": optimizer, "rate": rate, "seed": seed, "steps": steps}


def table(results: dict[str, dict[str, float]], runs: list[Run]) -> Table:
    """Held-out loss by optimizer and method, and over that of dense averaging with the same seed."""
    title = f"character LSTM, {RANKS} ranks: held-out loss in nats, over dense of the same seed"
    shown = Table("optimizer", "method", "loss, by seed", "/ dense, by seed", "mean", "fewer bytes", title=title)
    rows: dict[tuple[str, float, str], list[Run]] = {}
    for run in runs:
        rows.setdefault((run["optimizer"], run["rate"], run["method"]), []).append(run)
    for (optimizer, rate, method), mine in rows.items():
        losses = [results[run["name"]]["held_out"] for run in mine]
        dense = [results.get(named("dense", optimizer, rate, run["seed"], run["steps"])["name"], {}) for run in mine]
        over = [loss / each.get("held_out", math.nan) for loss, each in zip(losses, dense, strict=True)]
        by_seed = (" ".join(f"{each:.3f}" for each in column) for column in (losses, over))
        ratio = results[mine[0]["name"]]["ratio"]
        shown.add_row(f"{optimizer} {rate:g}", method, *by_seed, f"{statistics.mean(over):.3f}", f"{ratio:.1f} x")
    return shown


def main() -> None:
    """Run what is missing in one pair of processes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder that holds multi30k")
    parser.add_argument("--json", type=Path, required=True, help="results so far; written after every run")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="all that there are, if left out")
    parser.add_argument("--optimizers", nargs="+", choices=BEST, default=list(BEST))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tune", action="store_true", help="dense only, with every learning rate in RATES")
    arguments = parser.parse_args()
    methods = ["dense"] if arguments.tune else arguments.methods or [method for method in METHODS if known(method)]
    runs = [
        named(method, optimizer, rate, seed, arguments.steps)
        for seed in arguments.seeds
        for optimizer in arguments.optimizers
        for method in methods
        if ONLY.get(method, optimizer) == optimizer
        for rate in (RATES[optimizer] if arguments.tune else [BEST[optimizer]])
    ]
    missing = [run for run in runs if run["name"] not in read_results(arguments.json)]
    if missing:
        with tempfile.TemporaryDirectory() as folder:
            work_arguments = (missing, arguments.root, arguments.json, f"file://{folder}/store")
            torch.multiprocessing.spawn(work, work_arguments, RANKS)  # type: ignore[attr-defined, no-untyped-call]
    Console().print(table(read_results(arguments.json), runs))


if __name__ == "__main__":
    main()
