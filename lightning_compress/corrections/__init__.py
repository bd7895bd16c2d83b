"""Methods that take over a part of the optimizer's work, one to a file."""

from __future__ import annotations

from lightning_compress.corrections.base import Corrected, Correction, CorrectionPlan
from lightning_compress.corrections.dgc import DGC, WARMUP_DENSITIES
from lightning_compress.corrections.ef21 import EF21
from lightning_compress.corrections.loco import LoCo
from lightning_compress.corrections.onebit_adam import OneBitAdam

CORRECTED: dict[str, type[Corrected]] = {
    "dgc": DGC,
    "onebit_adam": OneBitAdam,
    "ef21": EF21,
}
"""What ``compressor=`` takes by name, beside the codecs and reducers."""

__all__ = [
    "CORRECTED",
    "DGC",
    "EF21",
    "WARMUP_DENSITIES",
    "Corrected",
    "Correction",
    "CorrectionPlan",
    "LoCo",
    "OneBitAdam",
]
