"""Transports for exchanges: torch.distributed, threads, one process, and a counter around any of them."""

from lightning_compress.collectives.collective import Collective
from lightning_compress.collectives.counting import CountingCollective, World
from lightning_compress.collectives.local import LocalCollective
from lightning_compress.collectives.ordered import OrderedCollective
from lightning_compress.collectives.threads import run_threads
from lightning_compress.collectives.torch import TorchCollective

__all__ = [
    "Collective",
    "CountingCollective",
    "LocalCollective",
    "OrderedCollective",
    "TorchCollective",
    "World",
    "run_threads",
]
