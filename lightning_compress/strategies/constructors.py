"""Strategies by their names in Lightning: each makes its synchroniser, from arguments that are checked there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_compress.gossip import ALGORITHMS
from lightning_compress.periodic.gossip import Gossip
from lightning_compress.periodic.local_sgd import OPTIONS, LocalSGD
from lightning_compress.periodic.synchroniser import Synchroniser
from lightning_compress.settings.options import Options
from lightning_compress.strategies.common import register
from lightning_compress.strategies.periodic import PeriodicMixin
from lightning_compress.strategies.sidecar import SavedState

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


def constructor(makes: type[Synchroniser], more: Iterable[inspect.Parameter] = ()) -> Callable[..., None]:
    """An ``__init__`` of a strategy that takes the arguments of a synchroniser, and makes it.

    Args:
        makes: the synchroniser.
        more: what it takes by name beside those of its signature.
    """
    own = [
        each for each in inspect.signature(makes, eval_str=True).parameters.values() if each.kind != each.VAR_KEYWORD
    ]
    known = [*own, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in more)]

    def __init__(  # noqa: N807
        self: Any, *args: Any, state: SavedState = "sidecar", strict_state: bool = False, **kwargs: Any
    ) -> None:
        given = {each.name: kwargs.pop(each.name) for each in known if each.name in kwargs}
        PeriodicMixin.__init__(self, makes(*args, **given), state, strict_state, **kwargs)

    us, *_, state, strict, rest = inspect.signature(__init__, eval_str=True).parameters.values()
    __init__.__signature__ = inspect.Signature([us, *known, state, strict, rest])  # type: ignore[attr-defined]
    return __init__


def _option(name: str) -> inspect.Parameter:
    """One of the settings of a compression."""
    usual = getattr(Options, name, None)
    usual = usual if isinstance(usual, bool | int | str) else None
    named = inspect.signature(Options.of, eval_str=True).parameters
    return named.get(name) or inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=usual, annotation=Any)


class LocalSGDMixin(PeriodicMixin):
    """Turns a ``DDPStrategy`` into one of local steps; see ``LocalSGDStrategy``."""

    __init__ = constructor(LocalSGD, map(_option, OPTIONS))

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the presets, and the variants of each."""
        register(strategy_registry, cls, "Local steps", LOCAL_STEPS)


class LocalSGDStrategy(LocalSGDMixin, DDPStrategy):
    """Ranks take local steps alone, then average what changed, compressed by any method that conserves.

    Its arguments are those of ``lightning_compress.periodic.LocalSGD``, and those of ``PeriodicStrategy``: ``state``,
    ``strict_state``, and Lightning's own.

    Raises:
        ValueError: unknown names or settings, values out of range, or what local steps cannot work with.
    """


class GossipMixin(PeriodicMixin):
    """Turns a ``DDPStrategy`` into one that trains by gossip; see ``GossipStrategy``."""

    __init__ = constructor(Gossip)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``gossip``, one name per algorithm, Moniqua with those that take it, and the variants of each."""
        named: dict[str, dict[str, object]] = {"gossip": {}, "gossip_moniqua": {"compressor": "moniqua"}}
        named |= {f"gossip_{name}": {"algorithm": name} for name in ALGORITHMS.offered}
        named["gossip_d2_moniqua"] = {"algorithm": "d2", "compressor": "moniqua"}
        register(strategy_registry, cls, "Gossip", named)


class GossipStrategy(GossipMixin, DDPStrategy):
    """Decentralised data-parallel training: ranks average parameters with their neighbours, and nothing with all.

    Its arguments are those of ``lightning_compress.periodic.Gossip``, and those of ``PeriodicStrategy``: ``state``,
    ``strict_state``, and Lightning's own.

    Raises:
        ValueError: unknown names or settings, values out of range, a compressor that the algorithm cannot take, or an
            argument of DistributedDataParallel, which does not wrap the model here.
    """


LocalSGDStrategy.register_strategies(StrategyRegistry)
GossipStrategy.register_strategies(StrategyRegistry)
