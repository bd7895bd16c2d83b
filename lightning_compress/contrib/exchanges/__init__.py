"""Exchanges that ``auto`` never chooses, one in each file."""

from __future__ import annotations

from lightning_compress.contrib.exchanges.binomial import Binomial
from lightning_compress.contrib.exchanges.butterfly import Butterfly
from lightning_compress.contrib.exchanges.chain import Chain
from lightning_compress.contrib.exchanges.ok_topk import OkTopK
from lightning_compress.contrib.exchanges.recursive_doubling import RecursiveDoubling
from lightning_compress.contrib.exchanges.run_length import RunLength

__all__ = ["Binomial", "Butterfly", "Chain", "OkTopK", "RecursiveDoubling", "RunLength"]
