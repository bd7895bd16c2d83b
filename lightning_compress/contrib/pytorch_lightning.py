"""Contrib's callback for users of ``import pytorch_lightning``, whose classes differ from Lightning's."""

from __future__ import annotations

from pytorch_lightning import Callback

from lightning_compress.contrib.mesimp import MeSimpMixin


class MeSimp(MeSimpMixin, Callback):
    """See ``lightning_compress.MeSimp``."""
