"""Draw what the tutorial shows in W&B: its script on two hosts, dense and in 4 bits.

    sudo python -m tools.tutorial docs/tutorial.png

The hosts are network namespaces on this machine, with a link of 100 Mbit/s. The figures are the CSV
logger's, which are those of W&B.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.lab import Lab
from recipes.tables.drawing import amounts, canvas, save, styles

PAGE = Path(__file__).resolve().parents[1] / "docs/tutorial.md"
LAUNCH = "torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr 10.77.0.1 --master-port 29500 --node-rank"
NAMES = {"none": "DDP", "qsgd": "qsgd, 4 bits"}
AXES = {"seconds": "seconds of training", "comm/total_bytes_sent": "sent by a rank"}


def train(folder: Path, method: str) -> list[dict[str, float]]:
    """Run the script of ``PAGE`` on two hosts, and return what it logged at each logged step."""
    (script,) = re.findall(r"^```python\n(# train.py\n.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (folder / "train.py").write_text(script)
    with Lab(2, "100mbit") as lab:
        words = [sys.executable, "-m", *LAUNCH.split()]
        variables = os.environ | {"GLOO_SOCKET_IFNAME": lab.interface, "OMP_NUM_THREADS": "1"}
        hosts = [
            subprocess.Popen(lab.command(rank, *words, f"{rank}", "train.py", method), cwd=folder, env=variables)
            for rank in (0, 1)
        ]
        for host in hosts:
            if host.wait():
                raise RuntimeError(f"train.py {method} failed")
    return read(folder / f"logs/{method}/version_0/metrics.csv")


def read(path: Path) -> list[dict[str, float]]:
    """Return the figures of each step from the file of a CSVLogger, which has several rows for a step."""
    steps: dict[str, dict[str, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            steps.setdefault(row["step"], {}).update({name: float(value) for name, value in row.items() if value})
    return [each for each in steps.values() if {"train/loss", *AXES} <= each.keys()]


def draw(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Draw the loss of each run against time and against bytes into a PNG."""
    sooner, fewer = (runs["none"][-1][axis] / runs["qsgd"][-1][axis] for axis in AXES)
    title = f"The same loss {sooner:.1f} times as fast, with {fewer:.1f} times fewer bytes"
    figure, axes = canvas(title, (4.6, 5.2), nrows=2)  # the width of a telephone
    for panel, (axis, label) in zip(axes, AXES.items(), strict=True):
        for name, style in styles(["none", "qsgd"]).items():
            points = [(each[axis], each["train/loss"]) for each in runs[name]]
            panel.plot(*zip(*points, strict=True), **style, ms=4, lw=1.8, label=NAMES[name])
        panel.set(xlabel=label, ylabel="train/loss", xlim=(0, None))
    amounts(axes[1].xaxis)
    axes[1].locator_params(axis="x", nbins=5)
    axes[0].legend(frameon=False)
    save(figure, path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        draw({method: train(Path(scratch), method) for method in NAMES}, Path(sys.argv[1]))
