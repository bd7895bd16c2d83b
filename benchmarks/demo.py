"""What compression is for: every recipe on its embedded data, dense and compressed, over links of two speeds.

    python -m benchmarks.demo              # make demo
    python -m benchmarks.demo --paced      # links that are played, also where namespaces could be made

Two processes train on this machine, as fast as it is: quality, and the bytes that a rank sends in a step. Then steps of
the same model are timed at each rate. As root on Linux each process has a network namespace, and its link is shaped
(tc tbf); nothing outside of the namespaces is touched, and they are taken down again, also after Ctrl-C. Elsewhere the
link is played: whoever sends waits for as long as the bytes would have taken, and the table says "paced".
"""

from __future__ import annotations

import os
import time

from benchmarks._arguments import described, plain_errors
from benchmarks._demo.entries import ENTRIES, RATES, Entry
from benchmarks._demo.table import Row, conclusion, table
from benchmarks.harness.lab import Lab
from benchmarks.harness.launch import run_beside, run_ranks

RANKS = 2


@plain_errors()
def main() -> None:
    """Train, time, and print the table and its conclusion."""
    parser = described(__doc__)
    parser.add_argument("--paced", action="store_true", help="play the links")
    refused = "asked for with --paced" if parser.parse_args().paced else refusal()
    start = time.perf_counter()
    if refused:
        print(f"links are played, not measured: {refused}")
    rows = run(ENTRIES, paced=refused is not None)
    print(f"\n{table(rows, paced=refused is not None)}\n\n{conclusion(rows)}")
    print(f"\n{RANKS} processes on {os.cpu_count()} cores, {time.perf_counter() - start:.0f} s in all")


def refusal() -> str | None:
    """Why there can be no namespaces with links of a rate; None: there can."""
    try:
        with Lab(1, next(iter(RATES.values()))):
            return None
    except RuntimeError as error:
        return str(error)


def run(tasks: list[Entry], *, paced: bool) -> list[Row]:
    """A row for each method of each task.

    Args:
        tasks: what to train.
        paced: play the links.

    Raises:
        RuntimeError: a rank of a lab failed; carries what it wrote.
        torch.multiprocessing.ProcessRaisedException: another rank failed.
    """
    told = {"tasks": tasks, "paced": paced}
    if paced:
        from benchmarks._demo import rank  # imports Lightning, which takes seconds

        found = run_beside(RANKS, rank.find, told)[0]
    else:
        with Lab(RANKS, None) as lab:
            found = run_ranks(lab, told, "benchmarks._demo.rank", heard=True)[0]
    return [Row(**row) for row in found["rows"]]


if __name__ == "__main__":
    main()
