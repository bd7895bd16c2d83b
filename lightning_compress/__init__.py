"""Gradient compression for PyTorch Lightning: ``Trainer(strategy=CompressedDDPStrategy(compressor="topk"))``."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from wrapt import when_imported

if TYPE_CHECKING:
    from lightning_compress.callbacks.meprop import MeProp
    from lightning_compress.callbacks.monitor import CommunicationMonitor
    from lightning_compress.callbacks.profile import StepProfile
    from lightning_compress.callbacks.sufficient_factors import SufficientFactors
    from lightning_compress.codecs import Codec, Plan
    from lightning_compress.comparison import Comparison, compare
    from lightning_compress.contrib.asynchronous.strategy import AsyncGossipStrategy
    from lightning_compress.contrib.mesimp import MeSimp
    from lightning_compress.contrib.minibatch.minibatch_size import MinibatchSize
    from lightning_compress.contrib.theta_recovery import ThetaRecovery
    from lightning_compress.core.errors import ExchangeError
    from lightning_compress.core.registry import register
    from lightning_compress.engine.attach import attach
    from lightning_compress.engine.compression import Compression
    from lightning_compress.exchanges import Exchange, ExchangePlan
    from lightning_compress.gossip.moniqua import Moniqua
    from lightning_compress.reducers import Reducer, ReducerPlan
    from lightning_compress.strategies.compressed_ddp import CompressedDDPStrategy
    from lightning_compress.strategies.compressed_fsdp import CompressedFSDPStrategy
    from lightning_compress.strategies.constructors import GossipStrategy, LocalSGDStrategy
    from lightning_compress.strategies.fsdp_accumulation import SyncFSDPAccumulation

_HOMES = {
    "AsyncGossipStrategy": "contrib.asynchronous.strategy",
    "Codec": "codecs",
    "CommunicationMonitor": "callbacks.monitor",
    "Comparison": "comparison",
    "CompressedDDPStrategy": "strategies.compressed_ddp",
    "CompressedFSDPStrategy": "strategies.compressed_fsdp",
    "Compression": "engine.compression",
    "Exchange": "exchanges",
    "ExchangeError": "core.errors",
    "ExchangePlan": "exchanges",
    "GossipStrategy": "strategies.constructors",
    "LocalSGDStrategy": "strategies.constructors",
    "MeProp": "callbacks.meprop",
    "MeSimp": "contrib.mesimp",
    "MinibatchSize": "contrib.minibatch.minibatch_size",
    "Moniqua": "gossip.moniqua",
    "Plan": "codecs",
    "Reducer": "reducers",
    "ReducerPlan": "reducers",
    "StepProfile": "callbacks.profile",
    "SufficientFactors": "callbacks.sufficient_factors",
    "SyncFSDPAccumulation": "strategies.fsdp_accumulation",
    "ThetaRecovery": "contrib.theta_recovery",
    "attach": "engine.attach",
    "compare": "comparison",
    "register": "core.registry",
}
"""The module of each public name."""


def __getattr__(name: str) -> object:
    """Import on first use: torch and Lightning take seconds, and neither ``--help`` nor Hydra's search needs them."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name.isidentifier() and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")  # such as lightning_compress.codecs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


@when_imported("lightning.pytorch")
def _register(_: ModuleType) -> None:
    """Register our strategies with Lightning, whichever of the two packages is imported first."""
    import_module("lightning_compress.strategies.compressed_ddp")
    import_module("lightning_compress.strategies.compressed_fsdp")
    import_module("lightning_compress.strategies.constructors")
    import_module("lightning_compress.fabric")  # lightning imports its Fabric with its Trainer


@when_imported("pytorch_lightning")
def _register_there(_: ModuleType) -> None:
    """Register our strategies with ``pytorch_lightning`` too, which has its own class tree and registry."""
    import_module("lightning_compress.pytorch_lightning")


try:
    __version__ = version("lightning-compress")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.0.0"

__all__ = [
    "AsyncGossipStrategy",
    "Codec",
    "CommunicationMonitor",
    "Comparison",
    "CompressedDDPStrategy",
    "CompressedFSDPStrategy",
    "Compression",
    "Exchange",
    "ExchangeError",
    "ExchangePlan",
    "GossipStrategy",
    "LocalSGDStrategy",
    "MeProp",
    "MeSimp",
    "MinibatchSize",
    "Moniqua",
    "Plan",
    "Reducer",
    "ReducerPlan",
    "StepProfile",
    "SufficientFactors",
    "SyncFSDPAccumulation",
    "ThetaRecovery",
    "attach",
    "compare",
    "register",
]
