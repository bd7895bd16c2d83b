"""The methods that are compared, with their settings."""

from __future__ import annotations

from typing import Any

import torch

from lightning_compress.collectives import Collective
from lightning_compress.core.layout import Layout
from lightning_compress.gossip.algorithm import Mixing
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import build_topology

ALL_REDUCE = "all-reduce"
Settings = dict[str, Any]


def begin(settings: Settings, ranks: Collective, numel: int) -> Mixing:
    """Start to mix vectors of ``numel`` zeros by a method, on one of its ranks."""
    algorithm = build_algorithm(settings["algorithm"])
    topology = algorithm.fit_topology(build_topology(settings.get("topology", "ring"), ranks.size), None)
    compressor = build_gossip_compressor(settings.get("compressor"), algorithm)
    layout = Layout.of([("x", (numel,))])
    return algorithm.begin(torch.zeros(numel), Neighbours(ranks, topology), compressor, layout, 0)


def _moniqua(bits: int, every: int = 1) -> Settings:
    return {"algorithm": "dpsgd", "compressor": {"name": "moniqua", "bits": bits}, "sync_every": every}


def _sgp(delay: int) -> Settings:
    return {"algorithm": {"name": "sgp", "delay": delay}, "topology": "one_peer_exponential"}


METHODS: dict[str, Settings] = {
    ALL_REDUCE: {},
    "D-PSGD": {"algorithm": "dpsgd"},
    "D2": {"algorithm": "d2"},
    "D2, Moniqua, 4 bits": {"algorithm": "d2", "compressor": {"name": "moniqua", "bits": 4}},
    "SGP": _sgp(0),
    "SGP, used a round later": _sgp(1),
    "Moniqua, 8 bits": _moniqua(8),
    "Moniqua, 4 bits": _moniqua(4),
    "Moniqua, 4 bits, every 2nd step": _moniqua(4, every=2),
    "Moniqua, 4 bits, every 4th step": _moniqua(4, every=4),
    "Moniqua, 8 bits, every 3rd step": _moniqua(8, every=3),
    "Moniqua, 2 bits": _moniqua(2),
    "Moniqua, 1 bit": _moniqua(1),
    "CHOCO, 1 bit": {"algorithm": {"name": "choco", "gamma": 0.4}, "compressor": "efsign"},
    "DeepSqueeze, 1 bit": {"algorithm": {"name": "deepsqueeze", "eta": 0.1}, "compressor": "efsign"},
    "DCD, 8 bits": {"algorithm": "dcd", "compressor": {"name": "qsgd", "bits": 8}},
    "DCD, 2 bits": {"algorithm": "dcd", "compressor": {"name": "qsgd", "bits": 2}},
    "ECD, 8 bits": {"algorithm": "ecd", "compressor": {"name": "qsgd", "bits": 8}},
    "ECD, 2 bits": {"algorithm": "ecd", "compressor": {"name": "qsgd", "bits": 2}},
}
"""On a ring, but for SGP, whose ranks send to one other in a round.

Signs are of blocks of 1,024 with a float32 each; QSGD's 8 and 2 bits have a float32 for each bucket."""
