"""What compression adds to a training step on a GPU: the work of one of 8 ranks, on a side stream beside backward.

    python -m benchmarks.step --device cuda --seconds 300 --json step.json --trace trace.json.gz

ResNet-50 (64 images of 224 x 224), a Transformer of the shape of GPT-2's smallest and a large LSTM on synthetic data:
forward, backward and SGD through DistributedDataParallel, in TensorFloat-32 and under bfloat16 autocast. One process
has no peers: its hook receives what it sends eight times (``benchmarks/_gpu/echo.py``), so that a step encodes and
decodes as one of 8 ranks does by all_gather or two_shot, while nothing travels. Compression is what ``attach`` makes of
the model and SGD. PyTorch's hooks cast or factor, and sum over one. Methods take turns, some steps each; medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._arguments import described
from benchmarks._gpu import isolated
from benchmarks._gpu.machine import WIDTH, surroundings
from benchmarks._gpu.models import MODELS
from benchmarks._gpu.step import METHODS, measure
from benchmarks.harness import tables
from benchmarks.harness.results import write

PRECISIONS = ("bf16", "tf32")
MOST_SECONDS = 300.0
"""That one model in one precision may take, compiling included."""


def tasks_of(arguments: argparse.Namespace) -> list[isolated.Task]:
    """What is measured, the targets first; a trace of the first alone."""
    pairs = [(model, precision) for model in arguments.models for precision in arguments.precisions]
    each = 0.3 * arguments.seconds / len(pairs)  # the rest is setting up, and starting a process
    shared = {name: getattr(arguments, name) for name in ("methods", "ranks", "device", "bucket_mb", "small")}
    shared |= {"seconds": each, "setup": min(150.0, 0.4 * arguments.seconds)}
    tasks = [{"model": model, "precision": precision, **shared, "trace": None} for model, precision in pairs]
    tasks[0]["trace"] = arguments.trace
    return tasks


def rows(tasks: Sequence[isolated.Task], deadline: float) -> Iterator[isolated.Row]:
    """What ``measure`` says of each; once more without a method that broke the device."""
    again = []
    for row in isolated.run(measure, tasks, deadline, MOST_SECONDS):
        if "broken" in row:
            task = {name: row[name] for name in tasks[0]}
            again.append({**task, "methods": [each for each in task["methods"] if each != row["broken"]]})
        yield row
    if again:
        yield from rows(again, deadline)


def show(result: dict[str, Any]) -> None:
    """Print the table, and what the trace says."""
    columns = ("ms a step", "beyond none", "host, ms", "bytes a parameter", "waits for the device", "grows by")
    title = f"one step with the work of one of {result['ranks']} ranks, on {result['device']}"
    cells, said = [], []
    for row in result["rows"]:
        for name, found in row.get("measured", {}).items():
            cells.append((row["model"], row["precision"], name, *_cells(found)))
            if found.get("waits"):
                said.append(f"{row['model']} in {row['precision']} with {name} waits: {found['waits']}")
        if "error" in row:
            cells.append((row["model"], row["precision"], "all", row["error"]))
        if "overlap" in row:
            said.append(_overlap(row))
    head, caption = ("model", "precision", "method", *columns), f"medians of steps in turn; {result['software']}"
    tables.show(head, cells, title, caption, width=WIDTH)
    for line in said:
        print(line)


def _cells(found: isolated.Row) -> tuple[str, ...]:
    if "ms" not in found:
        return (found.get("error", "not timed")[:60],)
    beyond = f"{100 * found['overhead']:+.1f} %" if "overhead" in found else "-"
    host = f"{found['host_ms']:.2f}" if "host_ms" in found else "-"
    memory = f"{found['bytes_per_parameter']:.1f}" if "bytes_per_parameter" in found else "-"
    waits = "yes" if found.get("waits") else "no" if "waits" in found else "-"
    loss = "" if found.get("finite", True) else " (the loss is not finite)"
    return f"{found['ms']:.2f}{loss}", beyond, host, memory, waits, f"{found['growth']} B"


def _overlap(row: isolated.Row) -> str:
    found = row["overlap"]
    if "overlapped" not in found:
        return f"trace of {row['model']} with {found['method']}: no second stream of a GPU in it"
    what = f"{row['model']} in {row['precision']} with {found['method']}"
    share = f"{100 * found['overlapped']:.0f} % of the {found['side_ms']:.2f} ms that the side stream works"
    return f"trace of {what}: {share} ({found['launches']} launches) are beside work of the main stream"


def main() -> None:
    """Measure, print the table, and write JSON after every model if asked to."""
    parser = described(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, for tests")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--bucket-mb", type=float, help="the most that a bucket has (default: PyTorch's 25)")
    parser.add_argument("--ranks", type=int, default=8, help="whose work is done (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="for all of it (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of three steps (.json or .json.gz)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here; --device cpu --small tries it out")
    result = {**surroundings(torch.device(arguments.device)), "ranks": arguments.ranks, "rows": []}
    for row in rows(tasks_of(arguments), time.monotonic() + arguments.seconds):
        result["rows"].append(row)
        write(arguments.json, result)
    show(result)


if __name__ == "__main__":
    main()
