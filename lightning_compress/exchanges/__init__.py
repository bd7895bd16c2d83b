"""Patterns in which messages travel between ranks."""

from __future__ import annotations

from lightning_compress.exchanges.all_gather import AllGather
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.auto import Auto
from lightning_compress.exchanges.base import Exchange, ExchangePlan
from lightning_compress.exchanges.binomial import Binomial
from lightning_compress.exchanges.hierarchical import PLAIN, Hierarchical
from lightning_compress.exchanges.sparse.butterfly import Butterfly
from lightning_compress.exchanges.sparse.gtopk import GTopK
from lightning_compress.exchanges.sparse.ok_topk import OkTopK
from lightning_compress.exchanges.sparse.recursive_doubling import RecursiveDoubling
from lightning_compress.exchanges.sparse.run_length import RunLength
from lightning_compress.exchanges.sparse.split_gather import SplitGather
from lightning_compress.exchanges.two_shot import TwoShot

EXCHANGES: dict[str, type[Exchange]] = {**PLAIN, "ok_topk": OkTopK, "hierarchical": Hierarchical}
"""What ``exchange=`` takes by name."""

__all__ = [
    "EXCHANGES",
    "AllGather",
    "AllReduce",
    "Auto",
    "Binomial",
    "Butterfly",
    "Exchange",
    "ExchangePlan",
    "GTopK",
    "Hierarchical",
    "OkTopK",
    "RecursiveDoubling",
    "RunLength",
    "SplitGather",
    "TwoShot",
]
