"""Training steps over links of a set speed: ours beside DistributedDataParallel and PyTorch's own hooks.

    sudo python -m benchmarks.network --ranks 4 --rate 1gbit
    sudo python -m benchmarks.network --rate 100mbit --model alexnet --methods 'DDP,dgc 0.1 %,{"compressor": "fft"}'

Linux and root: each rank gets a network namespace, a link to a bridge, and a token bucket (tc tbf) in both directions;
everything is taken down again, also after Ctrl-C. iproute2 is needed. Methods take turns, in rounds; medians of all
steps of rank 0, whose interface counts what it sends, TCP, IP and Ethernet headers included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._network.lab import Lab
from benchmarks._network.methods import OURS, PYTORCH, make
from benchmarks._network.models import MODELS


def measure(ranks: int, rate: str | None, model: str, methods: list[str], steps: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a step, bytes on the wire and by formula, by method.

    Raises:
        RuntimeError: a rank failed; carries what it wrote.
    """
    with Lab(ranks, rate) as lab, tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/result.json"
        shared = {"ranks": ranks, "model": model, "methods": methods, "steps": steps, "rounds": rounds}
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        processes = []
        try:
            for rank in range(ranks):
                told = json.dumps(shared | {"rank": rank, "master": lab.address(0), "result": result})
                words = lab.command(rank, sys.executable, "-W", "ignore", "-m", "benchmarks._network.rank", told)
                with Path(folder, f"rank{rank}.log").open("w") as log:
                    processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
            failed = [rank for rank, process in enumerate(processes) if process.wait()]
        finally:
            for process in processes:
                process.kill()
        if failed:
            said = Path(folder, f"rank{failed[0]}.log").read_text()[-3000:]
            raise RuntimeError(f"rank {failed} failed:\n{said}")
        found: dict[str, Any] = json.loads(Path(result).read_text())
        return found


def show(found: dict[str, Any], title: str) -> None:
    """Print a table."""
    medians, sent, formula = found["ms"], found["wire_bytes"], found["formula_bytes"]
    references = [each for name, each in medians.items() if name.startswith("PyTorch")]
    columns = ("method", "ms", "DDP / it", "best hook / it", "MB sent", "/ formula")
    table = Table(*columns, title=title, caption="best hook: of PyTorch's")
    for name, value in medians.items():
        table.add_row(
            name,
            f"{value:.1f}",
            f"{medians['DDP'] / value:.2f} x" if "DDP" in medians else "",
            f"{min(references) / value:.2f} x" if references else "",
            f"{sent[name] / 1e6:.3f}",
            f"{sent[name] / formula[name]:.3f}" if formula.get(name) else "",
        )
    Console().print(table)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it; none: not limited")
    parser.add_argument("--model", choices=MODELS, default="mlp")
    everything = ",".join([*PYTORCH, *OURS])
    parser.add_argument("--methods", default=everything, help="names, or JSON of attach()'s arguments, by commas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="the steps are done in so many rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    methods = names(arguments.methods)
    for name in methods:
        make(name)
    rate = None if arguments.rate == "none" else arguments.rate
    found = measure(arguments.ranks, rate, arguments.model, methods, arguments.steps, arguments.rounds)
    show(found, f"{arguments.model}, {arguments.ranks} ranks, {arguments.rate}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


def names(given: str) -> list[str]:
    """Split at commas that are not inside of JSON."""
    parts, depth = [""], 0
    for letter in given:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


if __name__ == "__main__":
    main()
