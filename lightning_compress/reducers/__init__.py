"""Methods that issue collectives themselves, one to a file."""

from __future__ import annotations

from lightning_compress.reducers.base import Reducer, ReducerPlan
from lightning_compress.reducers.powersgd import PowerSGD
from lightning_compress.reducers.signsgd import SignSGD
from lightning_compress.reducers.sketch import Sketch
from lightning_compress.reducers.terngrad_shared import TernGradShared

REDUCERS: dict[str, type[Reducer]] = {
    "terngrad_shared": TernGradShared,
    "signsgd": SignSGD,
    "powersgd": PowerSGD,
    "sketch": Sketch,
}
"""What ``compressor=`` takes by name, beside the codecs."""

__all__ = ["REDUCERS", "PowerSGD", "Reducer", "ReducerPlan", "SignSGD", "Sketch", "TernGradShared"]
