"""Gossip: averaging with neighbours only, one algorithm in each file.

An import here registers an algorithm by its ``name``. Errors and tables list the algorithms in this order.
"""
# ruff: noqa: I001

from __future__ import annotations

from lightning_compress.gossip.algorithm import Algorithm as Algorithm
from lightning_compress.gossip.dpsgd import DPSGD as DPSGD
from lightning_compress.gossip.d2 import D2 as D2
from lightning_compress.gossip.choco import Choco as Choco
from lightning_compress.gossip.sgp import SGP as SGP
from lightning_compress.core.registry import Registry, named

ALGORITHMS: Registry[Algorithm] = Registry(
    named(globals(), Algorithm),  # type: ignore[type-abstract]
    (Algorithm,),
    "lightning_compress.algorithms",
)
"""What ``algorithm=`` accepts by name."""

__all__ = ["ALGORITHMS", "Algorithm", *(each.__name__ for each in ALGORITHMS.values())]
