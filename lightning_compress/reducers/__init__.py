"""Methods that issue collectives themselves, one to a file."""

from __future__ import annotations

from lightning_compress.reducers.base import Reducer, ReducerPlan

REDUCERS: dict[str, type[Reducer]] = {}
"""What ``compressor=`` takes by name, beside the codecs."""

__all__ = ["REDUCERS", "Reducer", "ReducerPlan"]
