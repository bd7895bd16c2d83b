"""Reducers for comparison, one in each file."""

from __future__ import annotations

from lightning_compress.contrib.reducers.adam_mask import AdamMask
from lightning_compress.contrib.reducers.signsgd import SignSGD
from lightning_compress.contrib.reducers.sketch import Sketch
from lightning_compress.contrib.reducers.terngrad_shared import TernGradShared

__all__ = ["AdamMask", "SignSGD", "Sketch", "TernGradShared"]
