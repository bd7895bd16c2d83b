"""Patterns in which messages travel between ranks."""

from __future__ import annotations

from lightning_compress.exchanges.all_gather import AllGather
from lightning_compress.exchanges.all_reduce import AllReduce
from lightning_compress.exchanges.auto import Auto
from lightning_compress.exchanges.base import Exchange, ExchangePlan
from lightning_compress.exchanges.two_shot import TwoShot

EXCHANGES: dict[str, type[Exchange]] = {
    "auto": Auto,
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "two_shot": TwoShot,
}
"""What ``exchange=`` takes by name."""

__all__ = ["EXCHANGES", "AllGather", "AllReduce", "Auto", "Exchange", "ExchangePlan", "TwoShot"]
