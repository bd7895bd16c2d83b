"""What compression does to accuracy: ResNet-20 on CIFAR-10 for 3 epochs, the same seeds for every method.

    python -m benchmarks.accuracy --root data --json accuracy.json
    python -m benchmarks.accuracy --root data --json accuracy.json --ranks 8 --batch 16 --exchange two_shot --seeds 0

Two ranks of 64 images a step, or as many as one likes. Each run is the recipe in processes of its own, about 5 minutes
on two idle cores. Runs that the JSON file has already are not repeated, so that it may be interrupted.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile

from benchmarks._arguments import described, file_to_write, natural, plain_errors, positive
from benchmarks.harness.results import Results
from benchmarks.harness.tables import show
from recipes.tables.lineage import exit_on_sigterm, start_lineage

METHODS = {
    "dense": ["compressor=none"],
    "fp16": ["compressor=fp16"],
    "bf16": ["compressor=bf16"],
    "onebit": ["compressor=onebit"],
    "onebit, residual": ["compressor=onebit", "strategy.error_feedback=true"],
    "onebit, loco": ["compressor=onebit", "strategy.error_feedback=loco"],
    "rotated 4 bits": ["compressor=rotated", "compressor.bits=4"],
    "fft 85 %": ["compressor=fft", "compressor.theta=0.85"],
    "topk 10 %": ["compressor=topk", "compressor.density=0.1"],
    "topk 1 %": ["compressor=topk", "compressor.density=0.01"],
    "topk 1 %, no error feedback": ["compressor=topk", "compressor.density=0.01", "strategy.error_feedback=false"],
}


def train(overrides: list[str], root: str, seed: int) -> dict[str, float]:
    """One run of the recipe: its test accuracy in percent and its traffic."""
    command = [sys.executable, "-m", "recipes.train", "experiment=resnet_cifar10_short", f"data.root={root}"]
    quiet = ["trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false", "logger=none"]
    with tempfile.TemporaryDirectory() as folder:
        words = [*command, *quiet, *overrides, f"seed={seed}", f"hydra.run.dir={folder}"]
        run = subprocess.run(words, capture_output=True, text=True)
    found = re.search(r"test accuracy ([\d.]+) %(?:, ([\d.]+) x fewer)?", run.stdout)
    if run.returncode or not found:
        raise RuntimeError(f"{' '.join(overrides)} seed {seed} failed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return {"accuracy": float(found[1]), "ratio": float(found[2] or 1)}


@plain_errors()
def main() -> None:
    """Run what is missing, one after the other, and print the table."""
    parser = described(__doc__)
    parser.add_argument("--root", required=True, help="folder that holds cifar-10-batches-bin")
    parser.add_argument("--json", type=file_to_write, required=True, help="results so far; written after every run")
    parser.add_argument("--seeds", type=natural, nargs="+", default=[0, 1])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--batch", type=positive, default=64, help="images a rank and step")
    parser.add_argument("--exchange", default="auto", help="of the group conf/exchange")
    arguments = parser.parse_args()
    exit_on_sigterm()
    start_lineage()
    results, rows = Results(arguments.json), []
    ranks, batch, exchange = arguments.ranks, arguments.batch, arguments.exchange
    where = f"{ranks} ranks of {batch}, {exchange}"
    suffix = "" if (ranks, batch, exchange) == (2, 64, "auto") else f"/{where}"
    shared = [f"trainer.devices={ranks}", f"data.batch_size={batch}", f"exchange={exchange}"]
    for seed in arguments.seeds:
        for method in arguments.methods:
            if (name := f"{method}/{seed}{suffix}") not in results:
                results[name] = train([*METHODS[method], *shared], arguments.root, seed)
    for method in arguments.methods:
        found = [results[f"{method}/{seed}{suffix}"] for seed in arguments.seeds]
        accuracies = [each["accuracy"] for each in found]
        each = " ".join(f"{accuracy:.1f}" for accuracy in accuracies)
        rows.append((method, each, f"{statistics.mean(accuracies):.1f}", f"1 / {found[0]['ratio']:.1f}"))
    show(("method", "test accuracy, by seed", "mean", "bytes / dense"), rows, f"ResNet-20, CIFAR-10, {where}")


if __name__ == "__main__":
    main()
