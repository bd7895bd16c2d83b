"""``LocalSGDStrategy`` and ``GossipStrategy``: strategies that build their synchroniser from their own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.optim import Optimizer

from lightning_compress.codecs import Method
from lightning_compress.exchanges import Pattern
from lightning_compress.gossip import ALGORITHMS
from lightning_compress.gossip.algorithm import Algorithm
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.topology import Topology
from lightning_compress.periodic.fragment import Outer
from lightning_compress.periodic.gossip import Gossip
from lightning_compress.periodic.local_sgd import LocalSGD
from lightning_compress.settings.automatic import Automatic
from lightning_compress.strategies.common import register
from lightning_compress.strategies.periodic import PeriodicMixin
from lightning_compress.strategies.sidecar import SavedState
from lightning_compress.strategies.unsupported import check_clipping, check_still_scaled

LOCAL_STEPS: dict[str, dict[str, Any]] = {
    "local_sgd": {"sync_every": 16, "outer": "average"},
    "post_local_sgd": {"sync_every": 16, "outer": "average", "averaged_steps": 1000},
    "diloco": {"sync_every": 30, "outer": "nesterov"},
    "muloco": {
        "sync_every": 30,
        "outer": {"lr": 0.8, "momentum": 0.9, "nesterov": True},
        "compressor": {"name": "rotated", "bits": 2},
        "error_feedback": {"decay": 0.9},
    },
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


class LocalSGDMixin(PeriodicMixin):
    """Turn a ``DDPStrategy`` into one of local steps; see ``LocalSGDStrategy``."""

    def __init__(
        self,
        sync_every: int = 16,
        outer: Outer | str | dict[str, Any] = "average",
        compressor: Method | Automatic | str | dict[str, Any] = "auto",
        averaged_steps: int = 0,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        evaluate: Literal["anchor", "mean"] = "anchor",
        buffers: dict[str, Literal["mean", "rank0"]] | None = None,
        on_nonfinite: Literal["pass", "skip", "raise"] = "skip",
        check_drift_every: int = 1,
        *,
        average_gradients: str | dict[str, Any] | Sequence[str | dict[str, Any]] = (),
        exchange: Pattern | str | dict[str, Any] = "auto",
        error_feedback: bool | str | dict[str, Any] | None = None,
        warmup_steps: int | None = None,
        min_numel: int = 1024,
        seed: int | None = 0,
        schedule: str | dict[str, Any] | None = None,
        rules: Sequence[dict[str, Any]] | None = (),
        deterministic: bool = False,
        on_drift: Literal["error", "resync"] = "error",
        state: SavedState = "sidecar",
        strict_state: bool = False,
        **kwargs: Any,
    ) -> None:
        steps = LocalSGD(
            sync_every,
            outer,
            compressor,
            averaged_steps,
            fragments,
            delay,
            alpha,
            evaluate,
            buffers,
            on_nonfinite,
            check_drift_every,
            average_gradients,
            exchange=exchange,
            error_feedback=error_feedback,
            warmup_steps=warmup_steps,
            min_numel=min_numel,
            seed=seed,
            schedule=schedule,
            rules=rules,
            deterministic=deterministic,
            on_drift=on_drift,
        )
        super().__init__(steps, state, strict_state, **kwargs)

    synchroniser: LocalSGD

    def setup(self, trainer: Any) -> None:
        """See ``PeriodicStrategy``; also raise if gradient clipping would make averaged gradients differ."""
        if trainer.state.fn == "fit" and self.synchroniser.averaged.rules:
            check_clipping(trainer, self.lightning_module)
        super().setup(trainer)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """See ``PeriodicStrategy``; also raise if gradients to average were unscaled by hand."""

        def checked() -> Any:
            result = closure()
            if self.synchroniser.averages_gradients:
                check_still_scaled(self.precision_plugin, optimizer)
            return result

        return super().optimizer_step(optimizer, checked, model, **kwargs)

    def _finish_steps(self) -> None:
        self._steps.finish()
        super()._finish_steps()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of ``LOCAL_STEPS``, each with its variants."""
        register(strategy_registry, cls, "Local steps", LOCAL_STEPS)


class LocalSGDStrategy(LocalSGDMixin, DDPStrategy):
    """Local steps: each rank trains alone for some steps, then all ranks average what changed, compressed.

    The arguments are those of ``lightning_compress.periodic.LocalSGD`` and of ``PeriodicStrategy`` (``state``,
    ``strict_state``, Lightning's own). Any compressor works whose result is a mean (``conserves``). When local steps
    pay, and what they cost: ``lightning-compress docs local-steps``.

    Raises:
        ValueError: a name or setting is unknown, a value is out of range, or local steps cannot work with it.
    """


class GossipMixin(PeriodicMixin):
    """Turn a ``DDPStrategy`` into one that trains by gossip; see ``GossipStrategy``."""

    def __init__(
        self,
        algorithm: Algorithm | str | dict[str, Any] = "dpsgd",
        topology: Topology | str | dict[str, Any] | list[Any] = "ring",
        compressor: Method | Moniqua | str | dict[str, Any] | None = "auto",
        sync_every: int = 1,
        evaluate: Literal["mean", "local"] = "mean",
        buffers: dict[str, Literal["mean", "rank0"]] | None = None,
        average_states: bool = False,
        meet_every: int = 32,
        seed: int | None = 0,
        *,
        state: SavedState = "sidecar",
        strict_state: bool = False,
        **kwargs: Any,
    ) -> None:
        gossip = Gossip(
            algorithm, topology, compressor, sync_every, evaluate, buffers, average_states, meet_every, seed
        )
        super().__init__(gossip, state, strict_state, **kwargs)

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
    ``strict_state``, Lightning's own). When gossip pays, and which algorithm to choose:
    ``lightning-compress docs gossip``.

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
