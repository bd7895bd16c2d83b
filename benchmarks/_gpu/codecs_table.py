"""All codecs on a GPU: who is measured when, and the tables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._codecs import CASES
from benchmarks._gpu import isolated
from benchmarks._gpu.codecs import ORDER, WAYS, measure
from benchmarks._gpu.machine import console, surroundings
from benchmarks._timing import EVENTS

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
        if out:
            out.write_text(json.dumps(result, indent=1) + "\n")
    show(result, console())


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


def show(result: dict[str, Any], out: Console) -> None:
    """Print a table for each size."""
    for numel in dict.fromkeys(row["numel"] for row in result["rows"]):
        found = [row for row in result["rows"] if row["numel"] == numel]
        copies = [row["copy_gbs"] for row in found if "copy_gbs" in row]
        copy = f"a copy {min(copies):,.0f} to {max(copies):,.0f} GB/s" if copies else "nothing was measured"
        title = (
            f"{4 * numel / 2**20:,.0f} MB on {result['device']}: GB/s (share of a copy, x tensor operations); {copy}"
        )
        caption = f"* timed by events, not in a graph; scratch in bytes per element; {result['software']}"
        table = Table("codec", *PARTS.values(), "bits", *(f"scratch, {way}" for way in WAYS), title=title)
        table.caption = caption
        for row in found:
            if "kernels" in row:
                table.add_row(row["codec"], *(cell(row, part) for part in PARTS), *_sizes(row))
            else:
                table.add_row(row["codec"], row["error"])
        out.print(table)


def cell(row: isolated.Row, part: str) -> str:
    """``2310 (71 %, 9.0 x)``, with a star where no graph was timed; or what went wrong."""
    fast, slow = (row[way].get(part, row[way]) for way in WAYS)
    if "ms" not in fast:
        return str(fast.get("error", "-"))[:40]
    ratio = f", {slow['ms'] / fast['ms']:.1f} x" if "ms" in slow else ""
    star = "*" if fast["how"] == EVENTS else ""
    return f"{fast['gbs']:,.0f} ({100 * fast['share']:.0f} %{ratio}){star}"


def _sizes(row: isolated.Row) -> Iterator[str]:
    for way, what in (("kernels", "bits"), *((way, "scratch") for way in WAYS)):
        yield f"{row[way][what]:.2f}" if what in row[way] else "-"
