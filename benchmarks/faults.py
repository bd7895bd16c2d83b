"""Faults among real processes: what the ranks do, how soon, and whether training goes on bit for bit.

    python -m benchmarks.faults --repeats 8 --json faults.json

Two or three ranks train a small model over Gloo, with a checkpoint every other step, until the fault; then new ranks
go on from the last complete checkpoint, and parameters and residuals of every rank are compared with a run never
disturbed.
Trials that the JSON file has already are not repeated.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console

from benchmarks._arguments import described, file_to_write, positive, positives, some_of
from benchmarks.harness.faults.injection import INJECTIONS
from benchmarks.harness.faults.training import METHODS
from benchmarks.harness.faults.trial import SkippedError, Trials
from benchmarks.harness.results import Results
from benchmarks.harness.tables import show
from recipes.tables.lineage import exit_on_sigterm


def main() -> None:
    """Try what is missing, print the table, and fail if anything was lost."""
    parser = described(__doc__)
    parser.add_argument("--repeats", type=positive, default=8, help="of each fault, over methods and ranks in turn (8)")
    add = parser.add_argument
    add("--faults", type=some_of(INJECTIONS), default=list(INJECTIONS), help="which ones, by commas (default: all)")
    add("--methods", type=some_of(METHODS), default=list(METHODS), help=f"of {', '.join(METHODS)}, by commas (all)")
    parser.add_argument("--ranks", type=positives, default=[2, 3], help="world sizes, by commas (2,3)")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="results so far; written after every trial")
    arguments = parser.parse_args()
    worlds = list(itertools.product(arguments.methods, arguments.ranks))
    exit_on_sigterm()  # a disk is mounted for some trials
    results, trials, console = Results(arguments.json), Trials(), Console()
    for seed, (number, fault) in itertools.product(range(arguments.repeats), enumerate(arguments.faults)):
        method, size = worlds[(seed + number) % len(worlds)]
        name = f"{fault}/{method}/{size}/{seed}"
        if name in results:
            continue
        try:
            results[name] = asdict(trials.run(fault, method, size, seed))
        except SkippedError as error:
            console.print(f"{fault}: left out, {error}")
            continue
        for problem in results[name]["problems"]:
            console.print(f"{name}: {problem}", style="red", markup=False)
    show_results(list(results.values()))
    sys.exit(any(each["problems"] for each in results.values()))


def show_results(results: list[dict[str, Any]]) -> None:
    """Print a row for each fault."""
    rows = []
    for fault in dict.fromkeys(each["fault"] for each in results):
        ours = [each for each in results if each["fault"] == fault]
        seconds = [second for each in ours for second in each["seconds"]]
        causes = Counter(cause for each in ours for cause in each["causes"])
        wrong = sum(bool(each["problems"]) for each in ours)
        cells = (
            ", ".join(f"{cause} ({count})" for cause, count in causes.most_common()),
            f"{statistics.median(seconds):.2f}" if seconds else "-",
            f"{max(seconds):.2f}" if seconds else "-",
            f"{max(each['repeated'] for each in ours)}",
            f"{wrong} of {len(ours)}" if wrong else "nothing",
        )
        rows.append((fault, str(len(ours)), *cells))
    head = ("fault", "tried", "what the ranks said", "median s", "worst s", "steps again", "lost")
    show(head, rows, f"{len(results)} faults")


if __name__ == "__main__":
    main()
