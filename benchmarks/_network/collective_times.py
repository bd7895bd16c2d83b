"""One rank: how long each collective takes, and the bytes that its interface sends for it."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_compress.collectives import TorchCollective

PAUSE = 0.05
"""Seconds before each call, in which token buckets fill again."""
COLLECTIVES = ("all_reduce", "all_to_all", "all_gather")


def times(size: int, repeats: int, interface: str) -> dict[str, tuple[float, float]]:
    """Median seconds, and bytes sent, of each collective on this rank.

    Args:
        size: bytes of the tensor that is summed, of each row that is exchanged, and of each rank's message.
        repeats: how often each is measured, after once for nothing.
        interface: whose bytes are counted.
    """
    ranks = TorchCollective()
    sums, message = torch.ones(size // 4), torch.ones(size, dtype=torch.uint8)
    rows, out = (torch.ones(ranks.size, size, dtype=torch.uint8) for _ in range(2))
    calls: dict[str, Callable[[], None]] = {
        "all_reduce": lambda: ranks.all_reduce(sums),
        "all_to_all": lambda: ranks.all_to_all(rows, out),
        "all_gather": lambda: ranks.all_gather(message, out),
    }
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    found = {}
    for name, call in calls.items():
        taken, sent = [], []
        for _ in range(repeats + 1):
            dist.barrier()
            time.sleep(PAUSE)
            before, start = int(counter.read_text()), time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
            dist.barrier()
            sent.append(int(counter.read_text()) - before)
        found[name] = (statistics.median(taken[1:]), statistics.median(sent[1:]))
    return found


def main(told: dict[str, Any]) -> None:
    """See ``launch.run_ranks``."""
    torch.set_num_threads(1)
    rank, ranks = told["rank"], told["ranks"]
    dist.init_process_group("gloo", init_method=f"file://{told['store']}", rank=rank, world_size=ranks)
    found = times(told["size"], told["repeats"], told["interface"])
    Path(told["result"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
