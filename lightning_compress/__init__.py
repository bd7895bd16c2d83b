"""Gradient compression for PyTorch Lightning: ``Trainer(strategy=CompressedDDPStrategy(compressor="topk"))``."""

import sys
from importlib.metadata import PackageNotFoundError, version

from lightning_compress.codecs import Codec
from lightning_compress.compare import Comparison, compare
from lightning_compress.compression import Compression
from lightning_compress.entry import attach
from lightning_compress.exchanges import Exchange
from lightning_compress.failures import ExchangeError
from lightning_compress.monitor import CommunicationMonitor
from lightning_compress.recovery import ThetaRecovery
from lightning_compress.strategy import CompressedDDPStrategy

# The other class tree has a registry of its own. It is not imported unasked: that would redirect Lightning's log.
if "pytorch_lightning" in sys.modules:
    import lightning_compress.pytorch_lightning  # noqa: F401

try:
    __version__ = version("lightning-compress")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.0.0"

__all__ = [
    "Codec",
    "CommunicationMonitor",
    "Comparison",
    "CompressedDDPStrategy",
    "Compression",
    "Exchange",
    "ExchangeError",
    "ThetaRecovery",
    "attach",
    "compare",
]
