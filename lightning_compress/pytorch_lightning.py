"""The strategies and callbacks for users of ``import pytorch_lightning``, which has its own class tree."""

from __future__ import annotations

from importlib import import_module

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_compress.callbacks.meprop import MePropMixin
from lightning_compress.callbacks.minibatch_size import MinibatchSizeMixin
from lightning_compress.callbacks.monitor import MonitorMixin
from lightning_compress.callbacks.profile import ProfileMixin
from lightning_compress.callbacks.sufficient_factors import SufficientFactorsMixin
from lightning_compress.strategies.asynchronous import AsyncGossipMixin
from lightning_compress.strategies.compressed_ddp import CompressedDDPMixin
from lightning_compress.strategies.constructors import GossipMixin, LocalSGDMixin


class AsyncGossipStrategy(AsyncGossipMixin, DDPStrategy):  # type: ignore[misc]  # two class trees
    """See ``lightning_compress.AsyncGossipStrategy``."""


class CompressedDDPStrategy(CompressedDDPMixin, DDPStrategy):  # type: ignore[misc]  # two class trees
    """See ``lightning_compress.CompressedDDPStrategy``."""


class GossipStrategy(GossipMixin, DDPStrategy):  # type: ignore[misc]  # two class trees
    """See ``lightning_compress.GossipStrategy``."""


class LocalSGDStrategy(LocalSGDMixin, DDPStrategy):  # type: ignore[misc]  # two class trees
    """See ``lightning_compress.LocalSGDStrategy``."""


class CommunicationMonitor(MonitorMixin, Callback):
    """See ``lightning_compress.CommunicationMonitor``."""


class MeProp(MePropMixin, Callback):
    """See ``lightning_compress.MeProp``."""


class MinibatchSize(MinibatchSizeMixin, Callback):
    """See ``lightning_compress.MinibatchSize``."""


class StepProfile(ProfileMixin, Callback):
    """See ``lightning_compress.StepProfile``."""


class SufficientFactors(SufficientFactorsMixin, Callback):
    """See ``lightning_compress.SufficientFactors``."""


def __getattr__(name: str) -> object:
    """Import what is in contrib on first use, as the package itself does."""
    if name not in ("MeSimp", "ThetaRecovery"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lightning_compress.contrib.pytorch_lightning"), name)


AsyncGossipStrategy.register_strategies(StrategyRegistry)
CompressedDDPStrategy.register_strategies(StrategyRegistry)
GossipStrategy.register_strategies(StrategyRegistry)
LocalSGDStrategy.register_strategies(StrategyRegistry)
