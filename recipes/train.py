"""Train a recipe: ``python -m recipes.train recipe=resnet compressor=topk compressor.density=0.01 trainer.devices=2``.

``--cfg job`` prints every setting, ``--help`` the groups. Multi-process runs start their own processes.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from torch.multiprocessing.spawn import ProcessRaisedException

from recipes import config
from recipes.predict import refuse_other_recipe
from recipes.tables.idle import Outlasted, refuse_idle
from recipes.tables.lineage import start_lineage
from recipes.tables.portrait import Portrait
from recipes.tables.record import Recorder, describe, report, writable
from recipes.task import Score, Task
from recipes.tracking import WandbLogger, close, go_on_writing, log_settings

__all__ = ["main", "train"]

EXPECTED = (
    ".*does not have many workers.*",  # a recipe says itself how many its data is worth
    "Total length of `list` across ranks is zero",  # a recipe without validation has no loader for it
    "`isinstance.treespec, LeafSpec.` is deprecated",  # Lightning's own business with PyTorch
    "Using `DistributedSampler` with the dataloaders.*",  # metrics count every example once, whatever is repeated
    "You're resuming from a checkpoint that ended before the epoch ended",  # see recipes.task.go_on_reading
)
"""Warnings of Lightning's about what a recipe does on purpose."""


def train(cfg: DictConfig) -> tuple[Score, float]:
    """Fit and test what ``cfg`` describes; with ``test_only``, test it alone.

    Args:
        cfg: the composed config of ``conf/config.yaml``.

    Returns:
        What the recipe is judged by, and its value on the test set, such as an accuracy in [0, 1].

    Raises:
        ValueError: a setting is wrong or has no effect, or the data is missing or damaged.
    """
    for message in EXPECTED:
        warnings.filterwarnings("ignore", message=message)
    config.null_for_none(cfg)
    folder = writable(cfg.output_dir)
    config.check_numbers(cfg)
    config.refuse_foreign_data(cfg)
    refuse_other_recipe(cfg)
    config.check_types(cfg)
    seed_everything(cfg.seed, workers=True)
    data: Any = config.build(cfg.data)
    model: Task = config.build(cfg.recipe, **data.dims)
    trainer: Trainer = config.build(cfg.trainer)
    trainer.callbacks[:0] = callbacks(cfg, trainer)  # type: ignore[attr-defined]
    if not cfg.test_only:
        refuse_idle(cfg, trainer, config.named())
    log_settings(trainer.loggers, cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True)), config.choices())
    if cfg.test_only:
        trainer.test(model, datamodule=data, ckpt_path=cfg.ckpt_path, verbose=False)
        value = float(trainer.callback_metrics[model.score.metric])
        if trainer.is_global_zero:
            print(f"test {model.score.label} {model.score.written(value)}")
    else:
        trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
        fitted = dict(trainer.callback_metrics)
        if "run/steps" not in fitted:
            raise ValueError(
                f"not one step was left to train: trainer.max_epochs={trainer.max_epochs}, trainer.max_steps="
                f"{trainer.max_steps}, ckpt_path={cfg.ckpt_path}; raise what ends the training, or null for ckpt_path"
            )
        go_on_writing(trainer.loggers, fitted)
        trainer.test(model, datamodule=data, verbose=False)
        facts = {"recipe": model.recipe, "choices": config.choices(), "seed": cfg.seed, "ranks": trainer.world_size}
        result = describe(model.score, fitted | trainer.callback_metrics, **facts)
        report(result, folder, getattr(trainer.checkpoint_callback, "best_model_path", ""))
        value = result["score"]["value"]
    close(trainer.loggers)
    return model.score, value


def callbacks(cfg: DictConfig, trainer: Trainer) -> list[Any]:
    """Those beside the trainer's own, which a command line may replace."""
    chosen = [config.build(cfg[group]) for group in ("backward", "minibatch") if cfg.get(group)]
    watching = any(isinstance(logger, WandbLogger) for logger in trainer.loggers)
    return [Recorder(), *chosen, Outlasted.of(cfg), *([Portrait()] if watching else [])]


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Hydra's entry point; returns what its sweepers minimise: error rates as they are, accuracy and BLEU negated."""
    start_lineage()
    try:
        config.refuse_multirun(cfg, HydraConfig.get().mode)
        score, value = train(cfg)
    except (ValueError, InstantiationException, ProcessRaisedException) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not (line := config.in_a_line(error)):
            raise
        sys.exit(line)
    return score.cost(value)


if __name__ == "__main__":
    sys.argv[1:] = config.checked(sys.argv[1:])
    main()
