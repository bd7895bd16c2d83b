"""All codecs on a GPU: who is measured when, and the tables."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._codecs import CASES
from benchmarks._gpu import isolated
from benchmarks._gpu.codecs import ORDER, WAYS, measure
from benchmarks._gpu.machine import WIDTH, surroundings
from benchmarks._timing import EVENTS
from benchmarks.harness import tables
from benchmarks.harness.results import write

SIZES = (25 << 18, 1 << 28)
"""Elements of a bucket of 25 MB, and of 1 GB."""
PARTS = {"encode_sum": "encode with residual", "send": "encode alone", "decode": "decode", "decode_8": "decode 8"}
MOST_SECONDS = 300.0
"""That one codec may take at one size, compiling included."""


def main(codecs: Sequence[str] | None, numel: int | None, rounds: int, seconds: float, out: Path | None) -> None:
    """Measure, print a table for each size, and write JSON after every row if asked to.

    Args:
        codecs: names, or None for all, those that matter most first.
        numel: elements of the vector, or None for ``SIZES``.
        rounds: at the most.
        seconds: for all of it.
        out: a file.
    """
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no CUDA device here")
    result: dict[str, Any] = {**surroundings(torch.device("cuda")), "rows": []}
    sizes = [numel] if numel else SIZES
    for row in rows(codecs or by_importance(), sizes, "cuda", rounds, time.monotonic() + seconds):
        result["rows"].append(row)
        write(out, result)
    show(result)


def by_importance() -> list[str]:
    """All codecs, those of the targets first."""
    return [*ORDER, *(name for name in CASES if name not in ORDER)]


def rows(
    codecs: Sequence[str], sizes: Sequence[int], device: str, rounds: int, deadline: float
) -> Iterator[isolated.Row]:
    """What ``measure`` returns, or an error, for each codec and size; in other processes, which may die."""
    count = len(codecs) * len(sizes)
    each = max(0.5, min(3.0, 0.5 * (deadline - time.monotonic()) / max(1, count)))  # the rest is setting up
    tasks = [
        {"codec": codec, "numel": numel, "device": device, "rounds": rounds, "seconds": each}
        for codec in codecs
        for numel in sizes
    ]
    return isolated.run(measure, tasks, deadline, MOST_SECONDS)


def show(result: dict[str, Any]) -> None:
    """Print a table for each size."""
    for numel in dict.fromkeys(row["numel"] for row in result["rows"]):
        found = [row for row in result["rows"] if row["numel"] == numel]
        copies = [row["copy_gbs"] for row in found if "copy_gbs" in row]
        copy = f"a copy {min(copies):,.0f} to {max(copies):,.0f} GB/s" if copies else "nothing was measured"
        title = (
            f"{4 * numel / 2**20:,.0f} MB on {result['device']}: GB/s (share of a copy, x tensor operations); {copy}"
        )
        caption = f"* timed by events, not in a graph; scratch in bytes per element; {result['software']}"
        head = ("codec", *PARTS.values(), "bits", *(f"scratch, {way}" for way in WAYS))
        tables.show(head, ((row["codec"], *_cells(row)) for row in found), title, caption, width=WIDTH)


def cell(row: isolated.Row, part: str) -> str:
    """``2310 (71 %, 9.0 x)``, with a star where no graph was timed; or what went wrong."""
    fast, slow = (row[way].get(part, row[way]) for way in WAYS)
    if "ms" not in fast:
        return str(fast.get("error", "-"))[:40]
    ratio = f", {slow['ms'] / fast['ms']:.1f} x" if "ms" in slow else ""
    star = "*" if fast["how"] == EVENTS else ""
    return f"{fast['gbs']:,.0f} ({100 * fast['share']:.0f} %{ratio}){star}"


def _cells(row: isolated.Row) -> Iterator[str]:
    """All but the first."""
    if "kernels" not in row:
        yield row["error"]
        return
    yield from (cell(row, part) for part in PARTS)
    for way, what in (("kernels", "bits"), *((way, "scratch") for way in WAYS)):
        yield f"{row[way][what]:.2f}" if what in row[way] else "-"
