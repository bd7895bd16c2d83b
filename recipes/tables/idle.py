"""What a config says in vain: refused before a run begins, or named when it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig, OmegaConf

from lightning_compress import (
    AsyncGossipStrategy,
    CompressedDDPStrategy,
    CompressedFSDPStrategy,
    GossipStrategy,
    LocalSGDStrategy,
    MeProp,
    MeSimp,
    SufficientFactors,
    ThetaRecovery,
)
from recipes.config import CONF

__all__ = ["Outlasted", "refuse_idle"]

IDLE = {"compressor": ("auto", "none"), "exchange": ("auto",)}
"""Groups that only our strategy takes, and what says nothing of them."""
PHASES = ("strategy.warmup_steps", "strategy.averaged_steps")
"""Steps at the beginning of a run, in which all gradients are averaged as they are."""


class Outlasted(Callback):
    """Warns, when training begins, of a first phase that is as long as the run: what was chosen never begins.

    Args:
        phases: steps of each, by the name of the setting.
    """

    def __init__(self, phases: Mapping[str, int]) -> None:
        self.phases = phases

    @classmethod
    def of(cls, cfg: DictConfig) -> Outlasted:
        """The phases of a composed config."""
        phases = {name: steps for name in PHASES if (steps := OmegaConf.select(cfg, name))}
        every = OmegaConf.select(cfg, "strategy.sync_every")
        if every and (rounds := phases.get("strategy.warmup_steps")):  # local steps have rounds, after the first phase
            phases["strategy.warmup_steps"] = phases.get("strategy.averaged_steps", 0) + rounds * every
        return cls(phases)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn."""
        total = trainer.estimated_stepping_batches
        for name, steps in self.phases.items() if trainer.world_size > 1 else ():
            if steps >= total:
                rank_zero_warn(
                    f"{name}: the first phase has {steps} steps and the run {total}, so what is to follow never "
                    "begins; lower it, or train longer"
                )


def refuse_idle(cfg: DictConfig, trainer: Trainer, given: Sequence[str] = ()) -> None:
    """Stop a run in which something that was composed is nobody's.

    Args:
        cfg: the composed config.
        trainer: built from it.
        given: settings that the user named himself, see ``named``: the others may be a file's, for other models too.

    Raises:
        ValueError: a compressor, an exchange, factors, a shared choice, heads or a recovery would have no effect.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    kind = type(trainer.strategy).__name__
    compresses = isinstance(trainer.strategy, CompressedDDPStrategy | CompressedFSDPStrategy | LocalSGDStrategy)
    # these have a compressor, and neighbours instead of an exchange
    gossips = isinstance(trainer.strategy, GossipStrategy | AsyncGossipStrategy)
    chosen = [
        _typed(group, cfg[group])
        for group in IDLE
        if cfg.get(group) and cfg[group] not in _plain(group) and not (gossips and group == "compressor")
    ]
    if chosen and not compresses:
        raise ValueError(
            f"{', '.join(chosen)} has no effect: trainer.strategy is {kind}, which does not compress gradients; leave "
            "it at '${strategy}' with strategy=compressed_ddp, or take compressor=none"
        )
    if chosen and trainer.world_size == 1:
        raise ValueError(
            f"{', '.join(chosen)} has no effect: one process sends no gradients; take more, as in trainer.devices=2, "
            "or leave compressor and exchange out (auto), or take compressor=none"
        )
    composed = [group for group in IDLE if group in cfg]  # gossip has no exchange
    for group in composed if compresses or gossips else ():  # none is a choice here, too
        if cfg[group] != _plain(group)[0] and (own := cfg.strategy.get(group)) != cfg[group]:
            raise ValueError(
                f"{_typed(group, cfg[group])} has no effect: the strategy has its own, "
                f"strategy.{group}={own}; leave {group} out, or take 'strategy.{group}=${{{group}}}'"
            )
    if trainer.world_size == 1 and any(isinstance(each, SufficientFactors) for each in callbacks):
        raise ValueError(
            "backward=sufficient_factors has no effect: one process sends no gradients; take more, as in "
            "trainer.devices=2, or leave backward out"
        )
    if trainer.world_size == 1 and any(isinstance(each, MeProp | MeSimp) and each.share for each in callbacks):
        raise ValueError(
            "backward.share=true has no effect: one process has no others to choose with; take more, as in "
            "trainer.devices=2, or backward.share=false"
        )
    if cfg.recipe.get("model") == "lstm" and "recipe.heads" in given:
        raise ValueError(
            "recipe.heads has no effect: the LSTM's attention has one; leave it out, or take recipe.model=transformer"
        )
    watching = any(isinstance(each, ThetaRecovery) for each in callbacks)
    if cfg.get("recovery") and not watching:
        raise ValueError(
            "recovery has no effect: it is none of trainer.callbacks; add it, as in "
            """'trainer.callbacks=["${monitor}", "${recovery}"]'"""
        )
    if watching and 0 in (cfg.data.get("val_size"), cfg.trainer.limit_val_batches):
        raise ValueError(
            "recovery has no effect: nothing is validated, and it follows the validation; set data.val_size and "
            "trainer.limit_val_batches above 0"
        )


def _typed(group: str, node: DictConfig) -> str:
    """As on the command line: ``compressor=topk``."""
    target = node.get("_target_")
    options = ((path.stem, OmegaConf.load(path)) for path in sorted((CONF / group).glob("*.yaml")))
    named = (name for name, each in options if OmegaConf.select(each, "_target_") == target)
    return f"{group}={next(named, target)}"


def _plain(group: str) -> list[DictConfig]:
    """What a group is where nobody chose anything, and where nothing is wanted of it."""
    plain = [cast(DictConfig, OmegaConf.load(CONF / group / f"{name}.yaml")) for name in IDLE[group]]
    for each in plain:
        each.pop("defaults", None)
    return plain
