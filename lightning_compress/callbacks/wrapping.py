"""What callbacks ask of a strategy, of either Lightning package."""

from __future__ import annotations

from typing import Any


def wraps_model(strategy: Any) -> bool:
    """Whether it trains by DistributedDataParallel, which local steps and gossip only inherit from.

    Args:
        strategy: of the Trainer.
    """
    kinds = {each.__name__ for each in type(strategy).__mro__}
    return "DDPStrategy" in kinds and "PeriodicMixin" not in kinds
