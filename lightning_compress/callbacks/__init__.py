"""What ``Trainer(callbacks=...)`` takes."""

from typing import Any


def wraps_model(strategy: Any) -> bool:
    """Tell whether a strategy trains by DistributedDataParallel. Local steps and gossip only inherit from it.

    Args:
        strategy: of the Trainer, from either Lightning package.
    """
    kinds = {each.__name__ for each in type(strategy).__mro__}
    return "DDPStrategy" in kinds and "PeriodicMixin" not in kinds
