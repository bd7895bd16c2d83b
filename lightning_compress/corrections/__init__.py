"""Methods that take over a part of the optimizer's work, one to a file."""

from __future__ import annotations

from lightning_compress.corrections.base import Corrected, Correction, CorrectionPlan

CORRECTED: dict[str, type[Corrected]] = {}
"""What ``compressor=`` takes by name, beside the codecs and reducers."""

__all__ = ["CORRECTED", "Corrected", "Correction", "CorrectionPlan"]
