"""Measure the link between the ranks of a job."""

from __future__ import annotations

import os
import sys
from json import dumps


def link(json: bool = False) -> None:
    """Measure the link between all ranks, as exchange="auto" does; start it on every host with torchrun.

    ``torchrun ... --no-python lightning-compress link``, with the other arguments that the training has.

    Args:
        json: print JSON instead of a line.
    """
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]:
        raise ValueError(
            f"link: {missing[0]} is not set; start it with torchrun on every host: torchrun --nnodes 2 "
            "--nproc-per-node 1 --node-rank 0 --master-addr HOST --master-port 29500 "
            "--no-python lightning-compress link"
        )
    if os.environ["RANK"] == "0":
        print("waiting for all ranks, then measuring", file=sys.stderr, flush=True)
    from lightning_compress.commands.ranks import between_ranks

    found, rank, ranks = between_ranks("link: there is one rank, which sends nothing; start two or more")
    if rank == 0:
        figures = {"latency_s": float(f"{found.latency_s:.2g}"), "bytes_per_s": float(f"{found.bytes_per_s:.3g}")}
        print(dumps(figures) if json else f"{found} among {ranks} ranks: {figures}")
