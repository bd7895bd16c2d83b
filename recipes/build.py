"""Turn config nodes into objects."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import hydra.utils
from omegaconf import DictConfig

__all__ = ["TARGETS", "build"]

TARGETS = ("lightning_compress.*", "recipes.*", "lightning.pytorch.*", "torch.optim.*")
"""What a ``_target_`` may name."""


def build(cfg: DictConfig, **kwargs: Any) -> Any:
    """Instantiate ``cfg``, its children first; lists and mappings inside become native ones.

    Args:
        cfg: a node with ``_target_``.
        **kwargs: arguments beyond those of ``cfg``, stronger than them.

    Returns:
        The object, or a ``functools.partial`` of it where ``_partial_: true``.
    """
    whitelist = getattr(hydra.utils, "target_whitelist", None)  # from Hydra 1.4 on
    with whitelist(TARGETS) if whitelist else nullcontext():
        return hydra.utils.instantiate(cfg, _convert_="all", **kwargs)
