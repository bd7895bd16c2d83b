"""Names by which Lightning knows the strategies: ``Trainer(strategy="...")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VARIANTS: dict[str, dict[str, object]] = {
    "": {},
    "_spawn": {"start_method": "spawn"},
    "_fork": {"start_method": "fork"},
    "_notebook": {"start_method": "fork"},
}
"""Suffixes of every name, and their arguments."""

LOCAL_STEPS: dict[str, dict[str, Any]] = {
    "local_sgd": {"sync_every": 16, "outer": "average"},
    "post_local_sgd": {"sync_every": 16, "outer": "average", "averaged_steps": 1000},
    "diloco": {"sync_every": 30, "outer": "nesterov"},
    "sparseloco": {
        "sync_every": 30,
        "outer": {"lr": 1.0},
        "compressor": "sparseloco",
        "error_feedback": {"decay": 0.95},
    },
}
"""Settings of local steps by the registered name of the strategy."""


def register(
    registry: Any,
    cls: type,
    kind: str,
    named: Mapping[str, Mapping[str, object]],
    variants: Mapping[str, Mapping[str, object]] = VARIANTS,
) -> None:
    """Register a strategy under each name with each suffix; a name that is there stays as it is.

    Args:
        registry: Lightning's.
        cls: the strategy.
        kind: what it is, for people.
        named: its arguments by name.
        variants: further arguments by suffix.
    """
    for name, arguments in named.items():
        for suffix, more in variants.items():
            if name + suffix not in registry:
                given = {**arguments, **more}
                registry.register(name + suffix, cls, description=f"{kind}: {given or 'defaults'}", **given)
