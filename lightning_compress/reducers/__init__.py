"""Methods that issue collectives themselves, one per file.

An import here registers a reducer under its ``name``. Errors and tables list reducers in this order.
"""
# ruff: noqa: I001

from __future__ import annotations

from lightning_compress.collectives import World as World
from lightning_compress.collectives.counting import all_reduce_bytes as all_reduce_bytes
from lightning_compress.core.state import StateSpec as StateSpec, States as States
from lightning_compress.reducers.reducer import Reducer as Reducer, ReducerPlan as ReducerPlan
from lightning_compress.reducers.powersgd import PowerSGD as PowerSGD
from lightning_compress.core.registry import Registry, named

REDUCERS: Registry[Reducer] = Registry(named(globals(), Reducer), (Reducer,))  # type: ignore[type-abstract]
"""Registry that ``compressor=`` accepts, besides those of codecs."""

__all__ = [
    "REDUCERS",
    "StateSpec",
    "Reducer",
    "ReducerPlan",
    "States",
    "World",
    "all_reduce_bytes",
    *(each.__name__ for each in REDUCERS.values()),
]
