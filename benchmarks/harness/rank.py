"""What every rank does around its measuring: it joins the others, and leaves what it found.

``python -m benchmarks.harness.rank MODULE FILE`` is a rank that ``launch.run_ranks`` starts.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""Bytes that a rank of a lab has sent, headers included."""
PING_PORT, PINGS = 29501, 10


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


def leave(result: Path, found: Any) -> None:
    """Write what was found as JSON, and leave the group when all have."""
    result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


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


def round_trip_ms(rank: int, ranks: int, master: str) -> float | None:
    """Milliseconds that a byte takes from rank 0 to rank 1 and back, the least of a few; None on the others.

    All ranks call it at about the same time.
    """
    if rank > 1 or ranks < 2:
        return None
    if rank:
        with _reached(master) as connection:
            while said := connection.recv(1):
                connection.sendall(said)
        return None
    taken = []
    with socket.create_server((master, PING_PORT)) as server, server.accept()[0] as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            start = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            taken.append(time.perf_counter() - start)
    return 1e3 * min(taken)


def _reached(master: str) -> socket.socket:
    """Rank 0 may not listen yet."""
    end = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((master, PING_PORT), timeout=60)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


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
    leave(Path(told["result"]), found | {"ping_ms": round_trip_ms(told["rank"], told["ranks"], told["master"])})


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
