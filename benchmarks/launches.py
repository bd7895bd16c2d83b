"""What averaging a bucket starts on a GPU, counted without one: kernels, collectives and calls.

    python -m benchmarks.launches
    python -m benchmarks.launches --methods qsgd onebit --ranks 4 64 --show

The tensors are on the device "meta" and have no values, and Triton's kernels are counted in place of being launched. So
the counts are exact, and take a second. A bucket has six matrices and six vectors, side by side in memory, as
DistributedDataParallel's buckets are. The settings are what ``attach`` makes of the method and SGD. Calls are those of
the ordinary path, and of a step that is made again from what an earlier one recorded.
"""

from __future__ import annotations

from itertools import groupby

from benchmarks._arguments import described
from benchmarks.harness.launches import calls, launches
from benchmarks.harness.tables import show

CASES = [
    *((name, "all_gather", 2) for name in ("qsgd", "rotated", "onebit", "efsign", "topk", "dgc", "fft")),
    ("bf16", "all_reduce", 2),
    ("powersgd", "auto", 2),
    *((name, "two_shot", ranks) for name in ("qsgd", "rotated", "onebit", "efsign") for ranks in (4, 8, 64)),
]

CALLS = "Python", "C", "again: Python", "C"


def counts(name: str, exchange: str, size: int) -> tuple[str, ...]:
    """A row of the table."""
    started = launches(name, exchange, size)
    by = [sum(each.startswith(kind) for each in started.average) for kind in ("triton", "NCCL")]
    total = len(started.average)
    called = [each for recorded in (False, True) for each in calls(name, exchange, size, recorded=recorded)]
    figures = size, total, *by, total - sum(by), len(started.commit), *called
    return name, exchange, *map(str, figures)


def main() -> None:
    """Print the table."""
    names = list(dict.fromkeys(name for name, _, _ in CASES))
    parser = described(__doc__)
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--ranks", nargs="+", type=int, help="2 for all_gather; 4, 8, 64 for two_shot (default: all)")
    parser.add_argument("--show", action="store_true", help="print each launch, too")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if case[0] in arguments.methods]
    chosen = [case for case in chosen if not arguments.ranks or case[2] in arguments.ranks]
    head = ("compressor", "exchange", "ranks", "launches", "Triton", "NCCL", "PyTorch", "commit", *CALLS)
    show(head, [counts(*case) for case in chosen])
    for name, exchange, size in chosen if arguments.show else ():
        runs = ((what, len(list(run))) for what, run in groupby(launches(name, exchange, size).average))
        said = (what if count == 1 else f"{what} ({count} x)" for what, count in runs)
        print(f"{name} {exchange} {size}:", *said)


if __name__ == "__main__":
    main()
