"""What ``Trainer(callbacks=...)`` takes."""

from typing import Any

from lightning_compress.core.kinds import kinds_of


def wraps_model(strategy: Any) -> bool:
    """Tell whether a strategy trains by DistributedDataParallel. Local steps and gossip only inherit from it.

    Args:
        strategy: of the Trainer, from either Lightning package.
    """
    kinds = kinds_of(strategy)
    return "DDPStrategy" in kinds and "PeriodicMixin" not in kinds
