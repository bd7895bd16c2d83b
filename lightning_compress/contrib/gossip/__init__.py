"""Gossip algorithms for comparison, one in each file."""

from __future__ import annotations

from lightning_compress.contrib.gossip.dcd import DCD
from lightning_compress.contrib.gossip.deepsqueeze import DeepSqueeze
from lightning_compress.contrib.gossip.ecd import ECD

__all__ = ["DCD", "ECD", "DeepSqueeze"]
