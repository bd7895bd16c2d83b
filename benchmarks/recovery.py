"""A run that compresses too much, and recovers: ResNet-20 on 2 ranks, validation accuracy per epoch.

    python -m benchmarks.recovery --json recovery.json
    python -m benchmarks.recovery --root data --epochs 12 --theta 0.999 --seeds 3 --json recovery_cifar10.json

Dense; a fixed high theta without error feedback; a theta that falls with the learning rate; and ThetaRecovery, which
lowers theta after each epoch that gained too little: on digits less than 10 points, until the accuracy is 95 %; on
CIFAR-10 (``--root``, 10,000 of its images) less than 2 points. Each run is the recipe in processes of its own, on two
idle cores about a minute on digits, four on CIFAR-10. Runs that the JSON file has already are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks._arguments import file_to_write, plain_errors, positive
from recipes.tables.lineage import exit_on_sigterm, start_lineage

Found = dict[str, list[float]]
HIGH = ["compressor=fft", "strategy.error_feedback=false"]
METHODS = {
    "dense": ["compressor=none"],
    "fixed": HIGH,
    "falling": [*HIGH, "strategy.schedule={theta: {kind: lr, factor: 10}}"],
    "recovery": [
        *HIGH,
        *("recovery=theta", "recovery.values=[0.99, 0.9, 0.5, 0.0]", "recovery.patience=1"),
        'trainer.callbacks=["${monitor}", "${recovery}"]',
    ],
}
DIGITS, CIFAR = "digits", "CIFAR-10"
TASKS = {
    DIGITS: ["experiment=resnet_digits"],
    CIFAR: ["experiment=resnet_cifar10_short", "data.train_size=10000", "data.val_size=2000"],
}
STALLED = {
    DIGITS: ["recovery.min_delta=0.1", "recovery.target=0.95"],
    CIFAR: ["recovery.min_delta=0.02"],
}
"""When ThetaRecovery lowers theta."""


def overrides(method: str, root: Path | None, theta: float, epochs: int, seed: int) -> list[str]:
    """What a run tells the recipe."""
    task = CIFAR if root else DIGITS
    found = [*TASKS[task], *METHODS[method], f"trainer.max_epochs={epochs}", f"seed={seed}"]
    found += [f"data.root={root}"] if root else []
    found += [] if method == "dense" else [f"compressor.theta={theta}"]
    return found + (STALLED[task] if method == "recovery" else [])


def train(given: list[str], theta: float) -> Found:
    """One run of the recipe: validation accuracy in percent, ratio and theta at the end of each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipes.train", *given, f"hydra.run.dir={folder}"]
        quiet = ["trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false", "logger=csv"]
        run = subprocess.run([*command, *quiet], capture_output=True, text=True)
        files = sorted(Path(folder).rglob("metrics.csv"))
        if run.returncode or not files:
            raise RuntimeError(f"{' '.join(given)} failed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        with files[0].open() as file:
            return per_epoch(list(csv.DictReader(file)), theta)


def per_epoch(rows: list[dict[str, str]], theta: float) -> Found:
    """What the rows of a metrics.csv say at the end of each epoch; theta is that of the epoch's last step."""
    accuracies, ratios, thetas, ratio, following = [], [], [], 1.0, theta
    for row in rows:
        ratio = float(row.get("comm/ratio") or ratio)
        following = float(row.get("recovery/theta") or following)
        if row.get("val/acc"):
            accuracies.append(100 * float(row["val/acc"]))
            ratios.append(ratio)
            thetas.append(theta)
        theta = following
    return {"accuracy": accuracies, "ratio": ratios, "theta": thetas}


def show(title: str, runs: dict[str, list[Found]]) -> None:
    """Print each epoch: accuracies as the mean of the seeds, theta and ratio of ThetaRecovery by seed.

    Args:
        title: of the table.
        runs: by method, of each seed.
    """
    table = Table("epoch", *METHODS, "theta then", "ratio then", title=title)
    last = runs["recovery"]
    for epoch in range(len(last[0]["accuracy"])):
        means = [statistics.mean(run["accuracy"][epoch] for run in found) for found in runs.values()]
        thetas = " ".join(f"{run['theta'][epoch]:g}" for run in last)
        ratios = " ".join(f"{run['ratio'][epoch]:.1f}" for run in last)
        table.add_row(str(epoch), *(f"{each:.1f}" for each in means), thetas, ratios)
    Console(width=150).print(table)


@plain_errors()
def main() -> None:
    """Run what is missing, one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=file_to_write, required=True, help="results so far; written after every run")
    parser.add_argument("--root", type=Path, help="folder that holds cifar-10-batches-bin; without it, digits")
    parser.add_argument("--theta", type=float, default=0.9999, help="share of the spectrum that is dropped at first")
    parser.add_argument("--epochs", type=positive, default=15)
    parser.add_argument("--seeds", type=positive, default=1, help="runs of each method, with seeds from 0 on")
    arguments = parser.parse_args()
    exit_on_sigterm()
    start_lineage()
    results: dict[str, Found] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    task = CIFAR if arguments.root else DIGITS
    runs: dict[str, list[Found]] = {method: [] for method in METHODS}
    for seed in range(arguments.seeds):
        for method in METHODS:
            name = f"{task}/{method}/{arguments.theta}/{arguments.epochs}/{seed}"
            if name not in results:
                root = arguments.root.absolute() if arguments.root else None
                given = overrides(method, root, arguments.theta, arguments.epochs, seed)
                results[name] = train(given, 0.0 if method == "dense" else arguments.theta)
                arguments.json.write_text(json.dumps(results, indent=2))
                print(f"{name}: {results[name]['accuracy'][-1]:.1f} %", flush=True)
            runs[method].append(results[name])
    show(f"ResNet-20, {task}, theta {arguments.theta} without error feedback: validation accuracy, %", runs)


if __name__ == "__main__":
    main()
