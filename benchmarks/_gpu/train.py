"""ResNet-20 on CIFAR-10 with two ranks on one GPU: what each method's accuracy is, epoch by epoch.

    python -m benchmarks._gpu.train --data data --epochs 60 --seconds 900 --json train.json

The recipe's model, images, augmentation and schedule, in a loop of its own with everything on the GPU, where neither
Hydra nor a data loader is needed. Each method has a share of the seconds, and trains fewer epochs where they are not
enough: then the learning rate reaches 0 earlier, and the table says so. ``dgc`` has ten times the weight decay, which
gets no momentum from it; its density falls over five epochs, and ``onebit`` begins with a dense one. Some of the six
files will do, and so will their first images, for a comparison on fewer (3,073 bytes each):

    for each in data_batch_1 test_batch; do
        head -c $((6000 * 3073)) data/cifar-10-batches-bin/$each.bin > few/$each.bin
    done
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu.loop import files, rank_main
from benchmarks._gpu.machine import WIDTH, surroundings
from benchmarks.harness import tables
from benchmarks.harness.results import write

METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "rotated": {"compressor": {"name": "rotated", "bits": 4}, "exchange": "all_gather"},
    "topk": {"compressor": {"name": "topk", "density": 0.01}, "exchange": "all_gather"},
    "dgc": {"compressor": "dgc", "exchange": "all_gather", "schedule": "dgc", "decay": 10.0},
    "fft": {"compressor": "fft", "exchange": "all_gather"},
    "onebit": {"compressor": "onebit", "exchange": "all_gather", "dense_epochs": 1},
    "powersgd": {"compressor": {"name": "powersgd", "rank": 4}, "dense_epochs": 1},
}
START = 60.0
"""Seconds after which a back end over which the ranks have not met is given up."""


def train(told: dict[str, Any], deadline: float, save: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Train with one method, in processes of their own.

    Args:
        told: see ``rank_main``.
        deadline: by ``time.monotonic()``.
        save: is given what there is after every epoch, so that nothing is lost where time is up.

    Returns:
        ``epochs``, ``ms_per_step``, ``ratio`` (how many times fewer bytes than float32 a step sends) and ``curve``: of
        each epoch its number, ``loss``, ``accuracy`` on the test images in percent, and ``seconds`` since the start;
        or an ``error`` beside what there is.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {**told, "folder": folder}
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=rank_main, args=(rank, told), daemon=True) for rank in range(told["ranks"])]
        for process in processes:
            process.start()
        begun, said = time.monotonic(), Path(folder, "said.jsonl")
        found = _read(said)
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            late = not said.exists() and time.monotonic() - begun > START
            if late or any(process.exitcode for process in processes):
                break
            time.sleep(0.1)
            now = _read(said)
            if len(now["curve"]) > len(found["curve"]):
                save(found := now)
        for process in processes:
            process.kill()
            process.join()
        found = _read(said)
        errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
    if len(found["curve"]) < found.get("epochs", 1):
        found["error"] = errors[0] if errors else "stopped: out of time" if found["curve"] else "it did not start"
    return found


def _read(said: Path) -> dict[str, Any]:
    """What rank 0 has said so far, in whole lines."""
    found: dict[str, Any] = {"curve": []}
    for line in said.read_text().splitlines(keepends=True) if said.exists() else ():
        if line.endswith("\n"):
            row = json.loads(line)
            found["curve"].append(row) if "epoch" in row else found.update(row)
    return found


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    title = f"ResNet-20, CIFAR-10, {result['ranks']} ranks x {result['batch']} images on one {result['device']}"
    head = ("method", "epochs", "test accuracy %", "the best", "ms a step", "fewer bytes", "over", "")
    rows = []
    for name, row in result["methods"].items():
        curve = row["curve"]
        last, best = (
            (f"{curve[-1]['accuracy']:.2f}", f"{max(e['accuracy'] for e in curve):.2f}") if curve else ("-", "-")
        )
        speed = f"{row['ms_per_step']:.1f}" if "ms_per_step" in row else "-"
        ratio = f"{row['ratio']:.1f} x" if "ratio" in row else "-"
        rows.append((name, str(len(curve)), last, best, speed, ratio, row["backend"], row.get("error", "")[:60]))
    tables.show(head, rows, title, f"wanted: {result['epochs']} epochs; {result['software']}", width=WIDTH)


def main() -> None:
    """Train with one method after the other, and write JSON after each."""
    from recipes.resnet.cifar10 import FOLDER  # imports Lightning, which takes seconds

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help=f"folder that holds {FOLDER}/, or its files")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--backends", nargs="+", choices=("nccl", "gloo"), default=["nccl", "gloo"], help="tried in turn"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="images a rank and step (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=60, help="at the most (default: %(default)s)")
    parser.add_argument("--images", type=int, help="train on the first so many only")
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--seconds", type=float, default=1800, help="for all of it (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the curves there")
    arguments = parser.parse_args()
    nested = arguments.data / FOLDER
    data = nested if nested.is_dir() else arguments.data
    try:
        files(data)
    except ValueError as error:
        parser.error(str(error))
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here")
    told = {**vars(arguments), "data": str(data), "json": None}
    shared = {name: told[name] for name in ("ranks", "batch", "epochs", "weight_decay")}
    result = {**surroundings(torch.device(arguments.device)), **shared, "methods": {}}
    deadline = time.monotonic() + arguments.seconds
    usable = ["gloo"] if arguments.device == "cpu" else list(arguments.backends)
    for number, name in enumerate(arguments.methods):

        def save(found: dict[str, Any], name: str = name) -> None:
            result["methods"][name] = found
            write(arguments.json, result)

        save(_try(told | METHODS[name], usable, deadline, len(arguments.methods) - number, save))
    show(result)


def _try(
    told: dict[str, Any],
    backends: list[str],
    deadline: float,
    left: int,
    save: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Train over the first back end that works; those that do not are dropped."""
    while True:
        seconds = (deadline - time.monotonic()) / left
        if seconds <= 0:
            return {"curve": [], "backend": "-", "error": "not trained: out of time"}
        found = train({**told, "backend": backends[0], "seconds": seconds}, time.monotonic() + seconds, save)
        found["backend"] = backends[0]
        if found["curve"] or len(backends) == 1:
            return found
        print(f"{backends.pop(0)}: {found['error']}")


if __name__ == "__main__":
    main()
