"""The ranks that torchrun started for a command."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_compress.collectives import TorchCollective
from lightning_compress.planning.cost import Link
from lightning_compress.planning.link import time_link


def between_ranks(alone: str) -> tuple[Link, int, int]:
    """Return the link between the ranks, this rank, and how many there are. Collective.

    Args:
        alone: the message if there is one rank.

    Raises:
        ValueError: there is one rank.
    """
    dist.init_process_group("gloo")
    try:
        ranks = TorchCollective()
        if ranks.size < 2:
            raise ValueError(alone)
        return time_link(ranks, torch.device("cpu")), ranks.rank, ranks.size
    finally:
        dist.destroy_process_group()
