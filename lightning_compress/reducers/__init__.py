"""Methods that issue collectives themselves, one to a file."""

from __future__ import annotations

from lightning_compress.reducers.base import Reducer, ReducerPlan
from lightning_compress.reducers.signsgd import SignSGD
from lightning_compress.reducers.terngrad_shared import TernGradShared

REDUCERS: dict[str, type[Reducer]] = {
    "terngrad_shared": TernGradShared,
    "signsgd": SignSGD,
}
"""What ``compressor=`` takes by name, beside the codecs."""

__all__ = ["REDUCERS", "Reducer", "ReducerPlan", "SignSGD", "TernGradShared"]
