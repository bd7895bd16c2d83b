"""Gradient compression for PyTorch Lightning: ``Trainer(strategy=CompressedDDPStrategy(compressor="topk"))``."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from lightning_compress.codecs import Codec
from lightning_compress.entry import attach
from lightning_compress.exchanges import Exchange
from lightning_compress.hook import Compression
from lightning_compress.monitor import CommunicationMonitor
from lightning_compress.strategy import CompressedDDPStrategy

if find_spec("pytorch_lightning"):  # its users look names up in a registry of its own
    import lightning_compress.pytorch_lightning  # noqa: F401

try:
    __version__ = version("lightning-compress")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.0.0"

__all__ = ["Codec", "CommunicationMonitor", "CompressedDDPStrategy", "Compression", "Exchange", "attach"]
