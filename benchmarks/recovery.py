"""A run that compresses too much, and recovers: ResNet-20 on digits, 2 ranks, accuracy per epoch.

    python -m benchmarks.recovery --json recovery.json

Dense; a fixed high theta without error feedback; and the same with ThetaRecovery, which lowers theta after each epoch
that gained less than 10 points, until the validation accuracy is 95 %. Each run is the recipe in processes of its own,
about a minute on two idle cores. Runs that the JSON file has already are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks._arguments import file_to_write, natural, plain_errors, positive
from recipes.tables.lineage import exit_on_sigterm, start_lineage

METHODS = {
    "dense": ["experiment=resnet_digits", "compressor=none"],
    "fixed": ["experiment=resnet_digits", "compressor=fft", "strategy.error_feedback=false"],
    "recovery": ["experiment=resnet_recovery"],
}


def train(method: str, theta: float, epochs: int, seed: int) -> dict[str, list[float]]:
    """One run of the recipe: validation accuracy in percent, ratio and theta at the end of each epoch."""
    overrides = [*METHODS[method], f"trainer.max_epochs={epochs}", f"seed={seed}"]
    if method != "dense":
        overrides.append(f"compressor.theta={theta}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipes.train", *overrides, f"hydra.run.dir={folder}"]
        quiet = ["trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false", "logger=csv"]
        run = subprocess.run([*command, *quiet], capture_output=True, text=True)
        files = sorted(Path(folder).rglob("metrics.csv"))
        if run.returncode or not files:
            raise RuntimeError(f"{' '.join(overrides)} failed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        with files[0].open() as file:
            return per_epoch(list(csv.DictReader(file)), 0.0 if method == "dense" else theta)


def per_epoch(rows: list[dict[str, str]], theta: float) -> dict[str, list[float]]:
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


@plain_errors()
def main() -> None:
    """Run what is missing, one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=file_to_write, required=True, help="results so far; written after every run")
    parser.add_argument("--theta", type=float, default=0.9999, help="share of the spectrum that is dropped at first")
    parser.add_argument("--epochs", type=positive, default=15)
    parser.add_argument("--seed", type=natural, default=0)
    arguments = parser.parse_args()
    exit_on_sigterm()
    start_lineage()
    results: dict[str, dict[str, list[float]]] = {}
    if arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    names = {method: f"{method}/{arguments.theta}/{arguments.epochs}/{arguments.seed}" for method in METHODS}
    for method, name in names.items():
        if name not in results:
            results[name] = train(method, arguments.theta, arguments.epochs, arguments.seed)
            arguments.json.write_text(json.dumps(results, indent=2))
    title = f"ResNet-20, digits, theta {arguments.theta} without error feedback: validation accuracy, %"
    table = Table("epoch", *METHODS, "theta then", "ratio then", title=title)
    columns = [results[name] for name in names.values()]
    for epoch, (theta, ratio) in enumerate(zip(columns[-1]["theta"], columns[-1]["ratio"], strict=True)):
        figures = [f"{column['accuracy'][epoch]:.1f}" for column in columns]
        table.add_row(str(epoch), *figures, f"{theta:g}", f"{ratio:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
