"""Contrib's callbacks for users of ``import pytorch_lightning``, whose classes differ from Lightning's."""

from __future__ import annotations

from pytorch_lightning import Callback

from lightning_compress.contrib.mesimp import MeSimpMixin
from lightning_compress.contrib.theta_recovery import RecoveryMixin


class MeSimp(MeSimpMixin, Callback):
    """See ``lightning_compress.MeSimp``."""


class ThetaRecovery(RecoveryMixin, Callback):
    """See ``lightning_compress.ThetaRecovery``."""
