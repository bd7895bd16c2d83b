"""The callback of contrib for users of ``import pytorch_lightning``, a class tree of its own."""

from __future__ import annotations

from pytorch_lightning import Callback

from lightning_compress.contrib.mesimp import MeSimpMixin


class MeSimp(MeSimpMixin, Callback):
    """See ``lightning_compress.MeSimp``."""
