"""Methods that do part of the optimizer's work, one per file."""

from __future__ import annotations

from lightning_compress.core.registry import Registry
from lightning_compress.corrections.correction import Corrected, Correction, CorrectionPlan
from lightning_compress.corrections.dgc import DGC, WARMUP_DENSITIES
from lightning_compress.corrections.loco import LoCo
from lightning_compress.corrections.onebit_adam import OneBitAdam

CORRECTED: Registry[Corrected] = Registry({"dgc": DGC, "onebit_adam": OneBitAdam}, (Corrected,))
"""Registry that ``compressor=`` accepts, besides those of codecs and reducers."""

__all__ = [
    "CORRECTED",
    "DGC",
    "WARMUP_DENSITIES",
    "Corrected",
    "Correction",
    "CorrectionPlan",
    "LoCo",
    "OneBitAdam",
]
