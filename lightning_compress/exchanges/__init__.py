"""Patterns in which messages travel between ranks."""

from __future__ import annotations

from lightning_compress.core.registry import Registry
from lightning_compress.exchanges.all_gather import AllGather
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.exchange import Exchange, ExchangePlan, Keeper, Pattern, Planner
from lightning_compress.exchanges.hierarchical import GONE, GROUP, PLAIN, Hierarchical
from lightning_compress.exchanges.sparse.split_gather import SplitGather
from lightning_compress.exchanges.two_shot import TwoShot

EXCHANGES: Registry[Pattern] = Registry({**PLAIN, "hierarchical": Hierarchical}, (Pattern,), GROUP, GONE)
"""Exchanges and planners that ``exchange=`` accepts by name."""

__all__ = [
    "EXCHANGES",
    "AllGather",
    "AllReduce",
    "Exchange",
    "ExchangePlan",
    "Hierarchical",
    "Keeper",
    "Pattern",
    "Planner",
    "SplitGather",
    "TwoShot",
]
