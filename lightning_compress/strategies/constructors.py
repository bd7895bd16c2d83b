"""``LocalSGDStrategy`` and ``GossipStrategy``: strategies that build their synchroniser from their own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
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
"""Arguments of ``LocalSGDStrategy`` by registered name."""
ASYNCHRONOUS: dict[str, dict[str, object]] = {
    "async_gossip": {},
    "async_gossip_moniqua": {"compressor": "moniqua"},
}
"""Arguments of contrib's ``AsyncGossipStrategy`` by registered name."""


def constructor(makes: type[Synchroniser], more: Iterable[inspect.Parameter] = ()) -> Callable[..., None]:
    """Return an ``__init__`` for a strategy that takes a synchroniser's arguments and builds it.

    Args:
        makes: the synchroniser's class.
        more: parameters that it takes by name, in addition to those of its signature.
    """
    parameters = inspect.signature(makes, eval_str=True).parameters.values()
    known = [parameter for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
    known += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in more]

    def __init__(  # noqa: N807
        self: Any, *args: Any, state: SavedState = "sidecar", strict_state: bool = False, **kwargs: Any
    ) -> None:
        named = {each.name: kwargs.pop(each.name) for each in known if each.name in kwargs}
        PeriodicMixin.__init__(self, makes(*args, **named), state, strict_state, **kwargs)

    us, *_, state, strict, rest = inspect.signature(__init__, eval_str=True).parameters.values()
    __init__.__signature__ = inspect.Signature([us, *known, state, strict, rest])  # type: ignore[attr-defined]
    return __init__


def _option(name: str) -> inspect.Parameter:
    """Return the parameter of one of the compression's ``Options``."""
    usual = getattr(Options, name, None)
    usual = usual if isinstance(usual, bool | int | str) else None
    named = inspect.signature(Options.of, eval_str=True).parameters
    return named.get(name) or inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=usual, annotation=Any)


class LocalSGDMixin(PeriodicMixin):
    """Turn a ``DDPStrategy`` into one of local steps; see ``LocalSGDStrategy``."""

    __init__ = constructor(LocalSGD, map(_option, OPTIONS))

    def _finish_steps(self) -> None:
        if list(self._counts.values()).count(self.attempts) > 1:
            self.synchroniser.after_step()  # an optimizer has stepped since the last count, perhaps after a round
        super()._finish_steps()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of ``LOCAL_STEPS``, each with its variants."""
        register(strategy_registry, cls, "Local steps", LOCAL_STEPS)


class LocalSGDStrategy(LocalSGDMixin, DDPStrategy):
    """Local steps: each rank trains alone for some steps, then all ranks average what changed, compressed.

    The arguments are those of ``lightning_compress.periodic.LocalSGD`` and of ``PeriodicStrategy`` (``state``,
    ``strict_state``, Lightning's own). Any compressor works whose result is a mean (``conserves``). When local steps
    pay, and what they cost: docs/local-steps.md.

    Raises:
        ValueError: a name or setting is unknown, a value is out of range, or local steps cannot work with it.
    """


class GossipMixin(PeriodicMixin):
    """Turn a ``DDPStrategy`` into one that trains by gossip; see ``GossipStrategy``."""

    __init__ = constructor(Gossip)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``gossip``, one name per algorithm and those with Moniqua, each with its variants.

        ``gossip_sgp`` is on the paper's graph.
        """
        named: dict[str, dict[str, object]] = {"gossip": {}, "gossip_moniqua": {"compressor": "moniqua"}}
        named |= {f"gossip_{name}": {"algorithm": name} for name in ALGORITHMS.offered}
        named["gossip_sgp"]["topology"] = "one_peer_exponential"
        named["gossip_d2_moniqua"] = {"algorithm": "d2", "compressor": "moniqua"}
        register(strategy_registry, cls, "Gossip", named)


class GossipStrategy(GossipMixin, DDPStrategy):
    """Decentralised data-parallel training: each rank averages parameters with its neighbours only.

    ``GossipStrategy("d2")`` is for ranks with different data; ``GossipStrategy({"name": "sgp", "delay": 1},
    "one_peer_exponential")`` sends models along a directed graph while the next steps compute.

    The arguments are those of ``lightning_compress.periodic.Gossip`` and of ``PeriodicStrategy`` (``state``,
    ``strict_state``, Lightning's own). When gossip pays, and which algorithm to choose: docs/gossip.md.

    Raises:
        ValueError: a name or setting is unknown, a value is out of range, the algorithm cannot take the compressor, or
            an argument belongs to DistributedDataParallel, which does not wrap the model here.
    """


def register_asynchronous(registry: Any, module: str) -> None:
    """Register the names of ``ASYNCHRONOUS``, each with its variants; contrib is imported when one of them is used.

    Args:
        registry: Lightning's ``StrategyRegistry``.
        module: that has ``AsyncGossipStrategy``.
    """

    def make(**arguments: Any) -> Any:
        return import_module(module).AsyncGossipStrategy(**arguments)

    register(registry, make, "Asynchronous gossip", ASYNCHRONOUS)


LocalSGDStrategy.register_strategies(StrategyRegistry)
GossipStrategy.register_strategies(StrategyRegistry)
register_asynchronous(StrategyRegistry, "lightning_compress.contrib.asynchronous.strategy")
