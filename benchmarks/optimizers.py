"""Which compressor goes with which optimizer: the same seeds for every method, at any number of ranks.

    python -m benchmarks.optimizers --root data --json optimizers.json
    python -m benchmarks.optimizers --root data --json optimizers.json --methods dense onebit --optimizers adamw
    python -m benchmarks.optimizers --root data --json optimizers.json --tune --seeds 0
    python -m benchmarks.optimizers --json mlp.json --model mlp --ranks 8 --optimizers adamw --exchange two_shot

Ranks are processes. A character LSTM on real text (``--root``) reads 16 excerpts of 64 characters of the English
captions of Multi30k a rank and step; a small MLP learns a function from 16 examples of noise. The learning rate falls
linearly to 0. It is each optimizer's best for dense averaging among those in RATES (``--tune`` trains them all), and no
method has one of its own. A run takes half a minute on two idle cores. Runs that the JSON file has already are not
repeated, so that it may be interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks._language import CharLSTM, excerpts, read_text
from benchmarks._teacher import MLP, Teacher
from benchmarks.harness.launch import run_beside
from benchmarks.harness.training import descend
from lightning_compress import attach
from lightning_compress.contrib.exchanges.binomial import Binomial
from lightning_compress.exchanges import AllGather, Pattern, TwoShot
from lightning_compress.planning.choose import Auto
from lightning_compress.settings.run_state import RunState

METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "bf16": {"compressor": "bf16"},
    "range_float 8 bits": {"compressor": {"name": "range_float", "bits": 8}},
    "natural": {"compressor": "natural"},
    "rotated 5 bits": {"compressor": {"name": "rotated", "bits": 5}},
    "rotated 4 bits": {"compressor": {"name": "rotated", "bits": 4}},
    "qsgd 4 bits": {"compressor": {"name": "qsgd", "bits": 4}},
    "qsgd 2 bits": {"compressor": {"name": "qsgd", "bits": 2}},
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
    "onebit_adam": {"compressor": "onebit_adam", "warmup_steps": 60},
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
BEST = {"lstm": {"sgd": 1.0, "adamw": 1e-2}, "mlp": {"sgd": 0.2, "adamw": 5e-3}}
"""LSTM, 2 ranks, dense, seed 0, held-out loss at each of RATES: 1.967, 1.754, 1.501, 1.369, 1.368 for SGD (of two equal
ones, the smaller), and 1.796, 1.591, 1.333, 1.205, 1.265 for AdamW; MLP, 8 ranks: 0.152, 0.130, 0.107, 0.120, 0.343 for
AdamW."""
RANKS, BATCH, LENGTH, LAST = 2, 16, 64, 20
EXCHANGES: dict[str, Pattern] = {
    "auto": Auto(fallback="never"),
    "all_gather": AllGather(),
    "two_shot": TwoShot(),
    "two_shot, same": TwoShot(sums="same"),
    "binomial": Binomial(),
}

Run = dict[str, Any]
"""``name`` (the key of its result), ``method``, ``optimizer``, ``rate``, ``seed``, ``steps``, ``model``, ``ranks``,
``exchange``."""


class Reading:
    """Characters of text: a new model, a rank's batch of a step, and the loss on half of the held-out text."""

    def __init__(self, root: Path) -> None:
        self._text = read_text(root)

    def model(self) -> torch.nn.Module:
        """A new one."""
        return CharLSTM(self._text.vocabulary)

    def batch(self, generator: torch.Generator) -> Tensor:
        """Excerpts."""
        return excerpts(self._text.train, BATCH, LENGTH, generator)

    @torch.no_grad()
    def held_out_loss(self, model: torch.nn.Module) -> float:
        """Mean loss on half of the held-out text, cut into excerpts of 128 characters."""
        length, text = 128, self._text.held_out
        rows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)[::2]
        return float(model(rows))


class Learning:
    """A function, by examples; likewise."""

    def __init__(self, root: Path | None = None) -> None:
        self._teacher = Teacher()

    def model(self) -> torch.nn.Module:
        """A new one."""
        return MLP()

    def batch(self, generator: torch.Generator) -> Tensor:
        """Examples."""
        return self._teacher.draw(BATCH, generator)

    @torch.no_grad()
    def held_out_loss(self, model: torch.nn.Module) -> float:
        """Squared error over the variance of what is to be learnt, on examples of its own."""
        return float(model(self._teacher.held_out))


TASKS = {"lstm": Reading, "mlp": Learning}
Train = Callable[[Run, Any], dict[str, float]]
"""Gets a run and its task."""


def train(run: Run, task: Reading | Learning) -> dict[str, float]:
    """One run, on this rank: held-out loss, training loss of the last 20 steps, how many times fewer bytes, seconds."""
    start = time.perf_counter()
    torch.manual_seed(run["seed"])
    model = task.model()
    ddp = DistributedDataParallel(model)
    compression = attach(ddp, exchange=EXCHANGES[run["exchange"]], **METHODS[run["method"]], seed=run["seed"])
    optimizer = OPTIMIZERS.get(run["method"], OPTIMIZERS[run["optimizer"]])(model.parameters(), run["rate"])
    generator = torch.Generator().manual_seed(1000 * run["seed"] + dist.get_rank())
    losses = descend(lambda: ddp(task.batch(generator)), optimizer, run["steps"])
    last = torch.stack(losses[-LAST:]).mean()
    dist.all_reduce(last)
    stats = compression.stats()
    compression.close()
    return {
        "held_out": task.held_out_loss(model),
        "training": float(last) / dist.get_world_size(),
        "ratio": stats["total_bytes_dense"] / stats["total_bytes_sent"],
        "seconds": time.perf_counter() - start,
    }


def work(runs: list[Run], root: Path, results: Path, trained: Train = train, digits: int = 3) -> None:
    """All runs, one after the other, on one rank; rank 0 writes down each result.

    Args:
        runs: each with its ``name``, and ``model``, one of ``TASKS``, which is the same for all.
        root: of the task's data.
        results: a JSON file.
        trained: what a run is.
        digits: of the losses that are printed.
    """
    task = TASKS[runs[0]["model"]](root)
    for number, run in enumerate(runs):
        figures = trained(run, task)
        if dist.get_rank() == 0:
            results.write_text(json.dumps(read_results(results) | {run["name"]: figures}, indent=2))
            said = f"held-out loss {figures['held_out']:.{digits}f}, {figures['seconds']:.0f} s"
            print(f"{number + 1}/{len(runs)} {run['name']}: {said}", flush=True)


def read_results(path: Path) -> dict[str, dict[str, float]]:
    """The results so far."""
    return json.loads(path.read_text()) if path.exists() else {}


def known(method: str) -> bool:
    """Whether there is such a compressor."""
    try:
        RunState.of(**METHODS[method])
    except ValueError as error:
        if "unknown compressor" in str(error):
            return False
        raise
    return True


def named(run: Run) -> Run:
    """A run, by the name that the results have for it."""
    name = "{optimizer} {rate:g}/{method}/seed {seed}/{steps} steps".format(**run)
    if (run["model"], run["ranks"], run["exchange"]) != ("lstm", RANKS, "auto"):
        name += "/{model}, {ranks} ranks, {exchange}".format(**run)
    return run | {"name": name}


def table(results: dict[str, dict[str, float]], runs: list[Run]) -> Table:
    """Held-out loss by optimizer and method, and over that of dense averaging with the same seed."""
    title = "{model}, {ranks} ranks, {exchange}: held-out loss, over dense of the same seed".format(**runs[0])
    shown = Table("optimizer", "method", "loss, by seed", "/ dense, by seed", "mean", "fewer bytes", title=title)
    rows: dict[tuple[str, float, str], list[Run]] = {}
    for run in runs:
        rows.setdefault((run["optimizer"], run["rate"], run["method"]), []).append(run)
    for (optimizer, rate, method), mine in rows.items():
        losses = [results[run["name"]]["held_out"] for run in mine]
        dense = [results.get(named(run | {"method": "dense"})["name"], {}) for run in mine]
        over = [loss / each.get("held_out", math.nan) for loss, each in zip(losses, dense, strict=True)]
        by_seed = (" ".join(f"{each:.3f}" for each in column) for column in (losses, over))
        ratio = results[mine[0]["name"]]["ratio"]
        shown.add_row(f"{optimizer} {rate:g}", method, *by_seed, f"{statistics.mean(over):.3f}", f"{ratio:.1f} x")
    return shown


def main() -> None:
    """Run what is missing in processes of one group, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder that holds multi30k, for the LSTM")
    parser.add_argument("--json", type=Path, required=True, help="results so far; written after every run")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="all that there are, if left out")
    parser.add_argument("--optimizers", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--model", choices=TASKS, default="lstm")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument(
        "--exchange", choices=EXCHANGES, default="auto", help="same: sums take as many bits as gradients"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tune", action="store_true", help="dense only, with every learning rate in RATES")
    arguments = parser.parse_args()
    if arguments.model == "lstm" and arguments.root is None:
        parser.error("--root is needed for the LSTM")
    same = {"steps": arguments.steps, "model": arguments.model, "ranks": arguments.ranks}
    same["exchange"] = arguments.exchange
    best = BEST[arguments.model]
    methods = ["dense"] if arguments.tune else arguments.methods or [method for method in METHODS if known(method)]
    runs = [
        named({"method": method, "optimizer": optimizer, "rate": rate, "seed": seed} | same)
        for seed in arguments.seeds
        for optimizer in arguments.optimizers
        for method in methods
        if ONLY.get(method, optimizer) == optimizer
        for rate in (RATES[optimizer] if arguments.tune else [best[optimizer]])
    ]
    missing = [run for run in runs if run["name"] not in read_results(arguments.json)]
    if missing:
        run_beside(arguments.ranks, work, missing, arguments.root, arguments.json)
    Console().print(table(read_results(arguments.json), runs))


if __name__ == "__main__":
    main()
