"""Print what ``advise`` predicts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import prod

from rich.console import Console
from rich.table import Table

from lightning_compress.commands.forecast import Row, advice, predicted, settings_of
from lightning_compress.commands.jobs import Job, Optimizer, Where
from lightning_compress.commands.speeds import speeds_for

LOSSES = "Losses: of a character LSTM with 424,320 parameters, not of your model."
NOTE_ON_SHARDS = (
    "Sharded: computing includes what FSDP2 sends within a replica. Its units are predicted to be as large as DDP's "
    "buckets."
)
LOSSES_OF_MUON = "Losses: of a character GPT with 98,000 hidden weights, not of your model."


def tell(job: Job, where: Where, cores_per_rank: float | None, device: str | None, busy: str, as_json: bool) -> None:
    """Time the codecs, and print the table and the advice.

    Args:
        job: what trains.
        where: it trains.
        cores_per_rank: CPU cores of each process; None: as measured, or 1.
        device: that encodes, as the user chose it.
        busy: that other programs use this machine, or empty.
        as_json: print JSON.
    """
    if where.prints and not (device == "cuda" and not job.gpu):
        print("timing codecs, which takes some seconds", file=sys.stderr, flush=True)
    cores = cores_per_rank or job.cores_per_rank or 1.0
    settings = settings_of(job.optimizer, where.shards).values()
    speeds, encoder, source = speeds_for(settings, where.ranks, device, job.gpu, busy, 1 / cores)
    if not where.prints:
        return
    rows = predicted(
        job.parameters,
        where.ranks,
        where.link,
        job.compute_ms,
        job.optimizer,
        cores,
        speeds,
        job.ready,
        encoder,
        where.shards,
    )
    losses = LOSSES_OF_MUON if job.optimizer == "muon" else LOSSES
    notes = [*job.notes, source, *([NOTE_ON_SHARDS] if where.shards else []), losses]
    if as_json:
        found = {"rows": [asdict(row) for row in rows], "advice": advice(rows), "notes": notes}
        sizes = {"ranks": where.ranks * (where.shards or 1), "shards": where.shards}
        print(json.dumps(found | {"compute_ms": job.compute_ms} | sizes, indent=2))
        return
    numel = sum(prod(shape) for _, shape in job.parameters)
    ranks = f"{where.ranks} replicas of {where.shards} ranks" if where.shards else f"{where.ranks} ranks"
    title = f"{numel / 1e6:,.3g} M parameters, {ranks}, {where.words}, computing {job.compute_ms:.3g} ms"
    show(rows, title, job.optimizer, notes)


def show(rows: Sequence[Row], title: str, optimizer: Optimizer, notes: Sequence[str]) -> None:
    """Print the table, the advice and the notes."""
    table = Table(title=title, title_justify="left")
    for name in ("method", "step, ms", "faster", "MB a step", f"more loss ({optimizer})"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        loss = "not measured" if row.loss is None else f"{row.loss:.1f} %"
        table.add_row(row.method, f"{row.step_ms:,.1f}", f"{row.speedup:.2f} x", f"{row.megabytes:,.2f}", loss)
    console = Console()
    console.print(table)
    for line in (advice(rows), *notes):
        console.print(line, highlight=False)
