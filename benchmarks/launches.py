"""What averaging a bucket starts on a GPU, counted without one: kernels, collectives and calls.

    python -m benchmarks.launches
    python -m benchmarks.launches --methods qsgd onebit --ranks 4 64 --show

The tensors are on the device "meta" and have no values, and Triton's kernels are counted in place of being launched. So
the counts are exact, and take a second. A bucket has six matrices and six vectors, side by side in memory, as
DistributedDataParallel's buckets are. The settings are what ``attach`` makes of the method and SGD. Calls are those of
the ordinary path, and of a step that is made again from what an earlier one recorded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from benchmarks.harness.launches import calls, launches

CASES = [
    *((name, "all_gather", 2) for name in ("qsgd", "rotated", "onebit", "efsign", "topk", "dgc", "fft")),
    ("bf16", "all_reduce", 2),
    ("powersgd", "auto", 2),
    *((name, "two_shot", ranks) for name in ("qsgd", "rotated", "onebit", "efsign") for ranks in (4, 8, 64)),
]

CALLS = "Python", "C", "again: Python", "C"


def table(methods: Sequence[str], ranks: Sequence[int] | None = None) -> Table:
    """Return the counts of a bucket as a table."""
    shown = Table("compressor", "exchange", "ranks", "launches", "Triton", "NCCL", "PyTorch", "commit", *CALLS)
    for name, exchange, size in CASES:
        if name in methods and (ranks is None or size in ranks):
            started = launches(name, exchange, size)
            by = [sum(each.startswith(kind) for each in started.average) for kind in ("triton", "NCCL")]
            total = len(started.average)
            called = [each for recorded in (False, True) for each in calls(name, exchange, size, recorded=recorded)]
            figures = total, *by, total - sum(by), len(started.commit), *called
            shown.add_row(name, exchange, str(size), *map(str, figures))
    return shown


def main() -> None:
    """Print the table."""
    names = list(dict.fromkeys(name for name, _, _ in CASES))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--ranks", nargs="+", type=int, help="2 for all_gather; 4, 8, 64 for two_shot (default: all)")
    parser.add_argument("--show", action="store_true", help="print each launch, too")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    console.print(table(arguments.methods, arguments.ranks))
    for name, exchange, size in CASES if arguments.show else ():
        if name in arguments.methods and (arguments.ranks is None or size in arguments.ranks):
            runs = ((what, len(list(run))) for what, run in groupby(launches(name, exchange, size).average))
            said = (what if count == 1 else f"{what} ({count} x)" for what, count in runs)
            console.print(f"{name} {exchange} {size}:", *said, markup=False)


if __name__ == "__main__":
    main()
