"""Contrib's strategy and callbacks for users of ``import pytorch_lightning``, whose classes differ from Lightning's."""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy

from lightning_compress.contrib.asynchronous.strategy import AsyncGossipMixin
from lightning_compress.contrib.mesimp import MeSimpMixin
from lightning_compress.contrib.minibatch.minibatch_size import MinibatchSizeMixin
from lightning_compress.contrib.theta_recovery import RecoveryMixin


class AsyncGossipStrategy(AsyncGossipMixin, DDPStrategy):  # type: ignore[misc]  # two class trees
    """See ``lightning_compress.AsyncGossipStrategy``."""


class MeSimp(MeSimpMixin, Callback):
    """See ``lightning_compress.MeSimp``."""


class MinibatchSize(MinibatchSizeMixin, Callback):
    """See ``lightning_compress.MinibatchSize``."""


class ThetaRecovery(RecoveryMixin, Callback):
    """See ``lightning_compress.ThetaRecovery``."""
