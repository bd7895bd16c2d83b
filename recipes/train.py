"""Train a recipe: ``python -m recipes.train recipe=resnet compressor=topk compressor.density=0.01 trainer.devices=2``.

``--cfg job`` prints every setting, ``--help`` the groups. Multi-process runs start their own processes.
"""

from __future__ import annotations

import csv
import os
import warnings
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lightning_compress import CompressedDDPStrategy, ThetaRecovery
from recipes.build import build
from recipes.task import Score, Task

__all__ = ["main", "train"]

CONF = Path(__file__).parents[1] / "conf"
IDLE = {"compressor": ("auto", "none"), "exchange": ("auto",)}
"""Groups that only our strategy takes, and what says nothing of them."""


def train(cfg: DictConfig) -> tuple[Score, float]:
    """Fit and test what ``cfg`` describes.

    Args:
        cfg: the composed config of ``conf/config.yaml``.

    Returns:
        What the recipe is judged by, and its value on the test set, such as an accuracy in [0, 1].

    Raises:
        ValueError: a setting is wrong or has no effect, or the data is missing or damaged.
    """
    # Images are in memory and augmented on the device: more workers would only copy them.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Our test sets are padded with blank images that the metrics leave out, so no image counts twice.
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders.*")
    seed_everything(cfg.seed, workers=True)
    data = build(cfg.data)
    model: Task = build(cfg.recipe, **data.dims)
    trainer: Trainer = build(cfg.trainer)
    if cfg.get("backward"):  # beside those of the trainer, which a command line may replace
        trainer.callbacks.insert(0, build(cfg.backward))  # type: ignore[attr-defined]
    refuse_idle(cfg, trainer)
    settings = cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True))
    for logger in trainer.loggers:
        logger.log_hyperparams(settings)
    trainer.fit(model, datamodule=data)
    go_on_writing(trainer.loggers)
    ratio = trainer.callback_metrics.get("comm/ratio")
    trainer.test(model, datamodule=data, verbose=False)
    value = float(trainer.callback_metrics[model.score.metric])
    _report(model.score, value, ratio)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()  # so that the next run of this process is a run of its own
    return model.score, value


def refuse_idle(cfg: DictConfig, trainer: Trainer) -> None:
    """Stop a run in which something that was composed is nobody's.

    Args:
        cfg: the composed config.
        trainer: built from it.

    Raises:
        ValueError: a compressor, an exchange or a recovery would have no effect.
    """
    kind, compresses = type(trainer.strategy).__name__, isinstance(trainer.strategy, CompressedDDPStrategy)
    chosen = [
        f"{group}={cfg[group].get('_target_')}" for group in IDLE if cfg.get(group) and cfg[group] not in _plain(group)
    ]
    if chosen and not compresses:
        raise ValueError(
            f"{', '.join(chosen)} has no effect: trainer.strategy is {kind}, which does not compress; leave it at "
            "'${strategy}' with strategy=compressed_ddp, or take compressor=none"
        )
    watching = any(isinstance(each, ThetaRecovery) for each in trainer.callbacks)  # type: ignore[attr-defined]
    if cfg.get("recovery") and not watching:
        raise ValueError(
            "recovery has no effect: it is none of trainer.callbacks; add it, as in "
            """'trainer.callbacks=["${monitor}", "${recovery}"]'"""
        )


def _plain(group: str) -> list[DictConfig]:
    """What a group is where nobody chose anything."""
    return [cast(DictConfig, OmegaConf.load(CONF / group / f"{name}.yaml")) for name in IDLE[group]]


def go_on_writing(loggers: list[Logger]) -> None:
    """Let CSV files keep what spawned processes wrote, whose columns this one has not seen."""
    for logger in loggers if getattr(rank_zero_only, "rank", 0) == 0 else ():  # other ranks write nothing
        if isinstance(logger, CSVLogger) and os.path.isfile(path := logger.experiment.metrics_file_path):
            with open(path, newline="") as file:
                logger.experiment.metrics_keys = next(csv.reader(file), [])


def refuse_multirun(cfg: DictConfig, mode: RunMode | None) -> None:
    """Stop a ``--multirun`` whose every process would start a multirun of its own.

    Args:
        cfg: the composed config.
        mode: Hydra's mode, ``HydraConfig.get().mode``.

    Raises:
        ValueError: the trainer would start more than one process by running this command line again.
    """
    devices = cfg.trainer.devices
    single = devices in (1, "1") and cfg.trainer.num_nodes == 1
    if mode != RunMode.MULTIRUN or single or cfg.strategy.get("start_method", "popen") != "popen":
        return
    raise ValueError(
        f"--multirun with trainer.devices={devices}, trainer.num_nodes={cfg.trainer.num_nodes}: each process would "
        "start the whole multirun again. Use trainer.devices=1, or strategy.start_method=spawn, or one command per "
        "run: a shell loop, torchrun, or W&B agents (recipes/*/sweeps)"
    )


@rank_zero_only
def _report(score: Score, value: float, ratio: Tensor | None) -> None:
    saving = f", {ratio:.1f} x fewer bytes than float32" if ratio is not None and ratio > 1 else ""
    print(f"test {score.label} {score.written(value)}{saving}")


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Hydra's entry point; returns what its sweepers minimise: error rates as they are, accuracy and BLEU negated."""
    refuse_multirun(cfg, HydraConfig.get().mode)
    score, value = train(cfg)
    return score.cost(value)


if __name__ == "__main__":
    main()
