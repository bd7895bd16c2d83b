"""Codecs for comparison, one in each file."""

from __future__ import annotations

from lightning_compress.contrib.codecs.adaptive import Adaptive
from lightning_compress.contrib.codecs.atomo import ATOMO
from lightning_compress.contrib.codecs.dct import DCT
from lightning_compress.contrib.codecs.natural import Natural
from lightning_compress.contrib.codecs.qsgd_elias import QSGDElias
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.contrib.codecs.threshold import Threshold
from lightning_compress.contrib.codecs.wangni import Wangni

__all__ = ["ATOMO", "DCT", "Adaptive", "Natural", "QSGDElias", "RandomK", "TernGrad", "Threshold", "Wangni"]
