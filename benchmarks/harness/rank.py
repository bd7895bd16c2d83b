"""What every rank does around its measuring: it joins the others, and leaves what it found.

``python -m benchmarks.harness.rank MODULE FILE`` is a rank that ``launch.run_ranks`` starts.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.ping import round_trip_ms

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""Bytes that a rank of a lab has sent, headers included."""


def join(meet: str, rank: int, ranks: int) -> None:
    """Be a rank of a Gloo group, on one core, as Lightning finds it too.

    Args:
        meet: where the ranks find each other, for ``init_process_group``.
        rank: of this process.
        ranks: how many.
    """
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)


@dataclass
class Span:
    """What some work took on this rank.

    Args:
        seconds: from where all ranks had come, until it was done here.
        sent: bytes on the wire of a lab, headers included.
    """

    seconds: float = 0.0
    sent: int = 0


@contextmanager
def spanned() -> Iterator[Span]:
    """Measure what is done within, in all ranks of a lab; the figures are there afterwards."""
    span = Span()
    dist.barrier()
    before, start = int(COUNTER.read_text()), time.perf_counter()
    yield span
    span.seconds = time.perf_counter() - start
    dist.barrier()  # until the others have got it, some of it may wait in a queue, uncounted
    span.sent = int(COUNTER.read_text()) - before


def main(module: str, told: dict[str, Any]) -> None:
    """Write what the module's ``find`` returns to a file, and the round trip.

    Args:
        module: its ``find`` is called with ``told`` when the ranks have met.
        told: ``meet``, ``rank``, ``ranks``, and ``result``, the file; ``master``, the first rank's address; and
            what is for ``find``.
    """
    find = importlib.import_module(module).find  # first: an import takes seconds, and the others would wait
    join(told["meet"], told["rank"], told["ranks"])
    found = find(told)
    dist.barrier()
    found |= {"ping_ms": round_trip_ms(told["rank"], told["ranks"], told["master"])}
    Path(told["result"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
