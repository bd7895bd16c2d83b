"""What every rank of the lab does around its measuring."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._network.ping import round_trip_ms


def report(told: dict[str, Any], find: Callable[[], dict[str, Any]]) -> None:
    """Join the other ranks, and write what ``find`` returns and the round trip to a file.

    Args:
        told: ``master``, ``rank``, ``ranks``, and ``result``, the file.
        find: is called when all have met.
    """
    torch.set_num_threads(1)
    address = f"tcp://{told['master']}:29500"
    dist.init_process_group("gloo", init_method=address, rank=told["rank"], world_size=told["ranks"])
    found = find()
    dist.barrier()
    ping = round_trip_ms(told["rank"], told["ranks"], told["master"])
    Path(told["result"]).write_text(json.dumps(found | {"ping_ms": ping}))
    dist.barrier()
    dist.destroy_process_group()
