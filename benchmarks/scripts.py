"""Is ``lightning-compress advise --script`` right? Two hosts, each with a core: predicted steps beside measured ones.

    sudo python -m benchmarks.scripts
    sudo python -m benchmarks.scripts --scripts mlp --rates 1gbit --methods qsgd --steps 5

The hosts are network namespaces with links of a set speed (see ``benchmarks.network``: Linux, root, iproute2). On both,
torchrun starts ``advise --script``, which measures computing, the link and the codecs. Then the script trains with each
method, and its steps are timed. The scripts are the three recipes on their embedded data, and an MLP of one's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._arguments import described, file_to_write, plain_errors, positive, some_of
from benchmarks.harness import tables
from benchmarks.harness.lab import Lab, bits_per_second, die_with_parent
from benchmarks.harness.launch import waited_for
from benchmarks.harness.results import write

QUIET = ["trainer=cpu", "trainer.num_nodes=2", "trainer.enable_progress_bar=false", "trainer.max_epochs=100"]
QUIET += ["trainer.enable_checkpointing=false", "trainer.enable_model_summary=false", "logger=none"]
LSTM = ["recipe=lstm_speech", "data.augment=null", "data.batch_size=8", "optimizer.lr=0.2"]
SCRIPTS: dict[str, tuple[str, list[str], str]] = {
    "mlp": ("benchmarks._scripts.mlp", ["--nodes", "2"], "--compressor="),
    "resnet": ("recipes.train", ["recipe=resnet", *QUIET], "compressor="),
    "lstm": ("recipes.train", [*LSTM, *QUIET], "compressor="),
    "nmt": ("recipes.train", ["recipe=nmt", "recipe.beam=1", *QUIET], "compressor="),
}
"""Module, its words, and the word that chooses a compressor."""
METHODS = {"none": "float32 (DDP)", "bf16": "bf16", "qsgd": "qsgd, 4 bits", "onebit": "onebit"}
"""Rows of the prediction, by compressor."""
NEAR = 0.25
PORT = "29500"


def beside(lab: Lab, words: Callable[[int], list[str]], folder: Path) -> str:
    """Run a command on each host, on a core of its own; return what the first one printed.

    Raises:
        RuntimeError: one failed; carries what it wrote.
    """
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": lab.interface, "MASTER_ADDR": lab.address(0)}
    with waited_for(folder) as processes:
        for rank in range(2):
            command = lab.command(rank, "taskset", "-c", str(rank), sys.executable, "-W", "ignore", *words(rank))
            environment = os.environ | own | {"MASTER_PORT": PORT, "NODE_RANK": str(rank)}
            with (folder / f"{rank}.out").open("w") as out, (folder / f"rank{rank}.log").open("w") as log:
                started = subprocess.Popen(command, env=environment, stdout=out, stderr=log, preexec_fn=die_with_parent)
            processes.append(started)
    return (folder / "0.out").read_text()


def predicted(name: str, rate: str, folder: Path) -> dict[str, float]:
    """Return the predicted milliseconds of a step, by compressor."""
    module, words, choose = SCRIPTS[name]
    advise = ["--no-python", sys.executable, "-m", "lightning_compress", "advise", "--json", "--script", module, "--"]
    start = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--master-port={PORT}"]
    with Lab(2, rate) as lab:
        start.append(f"--master-addr={lab.address(0)}")
        said = beside(lab, lambda rank: [*start, f"--node-rank={rank}", *advise, *words, f"{choose}none"], folder)
    rows = {row["method"]: row["step_ms"] for row in json.loads(said)["rows"]}
    return {compressor: rows[method] for compressor, method in METHODS.items()}


def measured(name: str, compressor: str, rates: list[str], steps: int, folder: Path) -> dict[str, float]:
    """Return the median milliseconds of a step, by rate."""
    module, words, choose = SCRIPTS[name]
    timed = ["-m", "benchmarks._scripts.timed", str(folder / "timed.json"), str(steps), ",".join(rates), module]
    with Lab(2, None) as lab:
        beside(lab, lambda rank: [*timed, *words, f"{choose}{compressor}"], folder)
    found: dict[str, float] = json.loads((folder / "timed.json").read_text())
    return found


def show(cells: list[dict[str, Any]]) -> None:
    """Print every cell, and how many predictions are near."""
    head = ("script", "rate", "compressor", "measured ms", "predicted ms", "predicted / measured")
    rows, ratios = list[tuple[str, ...]](), list[float]()
    for cell in cells:
        ratios.append(cell["predicted_ms"] / cell["ms"])
        names = (cell[key] for key in ("script", "rate", "compressor"))
        rows.append((*names, f"{cell['ms']:.0f}", f"{cell['predicted_ms']:.0f}", f"{ratios[-1]:.2f}"))
    tables.show(head, rows, words=3, width=100)
    print(f"within {NEAR:.0%}: {sum(abs(each - 1) <= NEAR for each in ratios)} of {len(ratios)}")


@plain_errors()
def main() -> None:
    """Predict, measure, and print the table."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--scripts", type=some_of(SCRIPTS), default=list(SCRIPTS), help=f"of {', '.join(SCRIPTS)}, by commas")
    add("--rates", default="100mbit,1gbit", help="by commas, as tc takes them")
    add("--methods", type=some_of(METHODS), default=list(METHODS), help=f"of {', '.join(METHODS)}, by commas")
    add("--steps", type=positive, default=12, help="that are timed at each rate, after three that are not")
    add("--json", type=file_to_write, help="write the cells here, after each script")
    given = parser.parse_args()
    rates = given.rates.split(",")
    for rate in rates:
        bits_per_second(rate)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.scripts:
            start = time.perf_counter()
            foreseen = {rate: predicted(name, rate, Path(folder)) for rate in rates}
            for compressor in given.methods:
                for rate, ms in measured(name, compressor, rates, given.steps, Path(folder)).items():
                    key = {"script": name, "rate": rate, "compressor": compressor}
                    cells.append({**key, "ms": ms, "predicted_ms": foreseen[rate][compressor]})
            write(given.json, cells)
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    show(cells)


if __name__ == "__main__":
    main()
