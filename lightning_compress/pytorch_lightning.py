"""The strategies and callbacks for users of ``import pytorch_lightning``, which has its own class tree."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry

from lightning_compress.callbacks.meprop import MePropMixin
from lightning_compress.callbacks.monitor import MonitorMixin
from lightning_compress.callbacks.profile import ProfileMixin
from lightning_compress.callbacks.script import ScriptMixin
from lightning_compress.callbacks.sufficient_factors import SufficientFactorsMixin
from lightning_compress.strategies.compressed_ddp import CompressedDDPMixin
from lightning_compress.strategies.compressed_fsdp import CompressedFSDPMixin
from lightning_compress.strategies.constructors import GossipMixin, LocalSGDMixin, register_asynchronous
from lightning_compress.strategies.fsdp_accumulation import SyncFSDPAccumulation

if TYPE_CHECKING:
    from lightning_compress.contrib.pytorch_lightning import AsyncGossipStrategy, MeSimp, MinibatchSize, ThetaRecovery

__all__ = [
    "AsyncGossipStrategy",
    "CommunicationMonitor",
    "CompressedDDPStrategy",
    "CompressedFSDPStrategy",
    "GossipStrategy",
    "LocalSGDStrategy",
    "MeProp",
    "MeSimp",
    "MinibatchSize",
    "StepProfile",
    "SufficientFactors",
    "SyncFSDPAccumulation",
    "ThetaRecovery",
]
_CONTRIB = "lightning_compress.contrib.pytorch_lightning"


class CompressedDDPStrategy(CompressedDDPMixin, DDPStrategy):  # type: ignore[misc]  # two class trees
    """See ``lightning_compress.CompressedDDPStrategy``."""


class CompressedFSDPStrategy(CompressedFSDPMixin, ModelParallelStrategy):  # type: ignore[misc]  # two class trees
    """See ``lightning_compress.CompressedFSDPStrategy``."""


class GossipStrategy(GossipMixin, DDPStrategy):  # type: ignore[misc]  # two class trees
    """See ``lightning_compress.GossipStrategy``."""


class LocalSGDStrategy(LocalSGDMixin, DDPStrategy):  # type: ignore[misc]  # two class trees
    """See ``lightning_compress.LocalSGDStrategy``."""


class CommunicationMonitor(MonitorMixin, Callback):
    """See ``lightning_compress.CommunicationMonitor``."""


class MeProp(MePropMixin, Callback):
    """See ``lightning_compress.MeProp``."""


class StepProfile(ProfileMixin, Callback):
    """See ``lightning_compress.StepProfile``."""


class ScriptProfile(ScriptMixin, Callback):
    """See ``lightning_compress.callbacks.script.ScriptProfile``."""


class SufficientFactors(SufficientFactorsMixin, Callback):
    """See ``lightning_compress.SufficientFactors``."""


def __getattr__(name: str) -> object:
    """Import what is in contrib on first use, as the package itself does."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CONTRIB), name)


CompressedDDPStrategy.register_strategies(StrategyRegistry)
CompressedFSDPStrategy.register_strategies(StrategyRegistry)
GossipStrategy.register_strategies(StrategyRegistry)
LocalSGDStrategy.register_strategies(StrategyRegistry)
register_asynchronous(StrategyRegistry, _CONTRIB)
