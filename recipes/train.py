"""Train a recipe: ``python -m recipes.train recipe=resnet compressor=topk compressor.density=0.01 trainer.devices=2``.

``--cfg job`` prints every setting, ``--help`` the groups. Multi-process runs start their own processes.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import get_class
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.multiprocessing.spawn import ProcessRaisedException

from recipes.build import CONF, build, by_group, refuse_foreign_data, whole_paths
from recipes.cells import nearest
from recipes.idle import Outlasted, refuse_idle
from recipes.lineage import start_lineage
from recipes.portrait import Portrait
from recipes.predict import read_checkpoint
from recipes.record import Recorder, describe, writable, write_result
from recipes.task import Score, Task
from recipes.tracking import WandbLogger

__all__ = ["main", "train"]

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "output_dir")


def train(cfg: DictConfig) -> tuple[Score, float]:
    """Fit and test what ``cfg`` describes; with ``test_only``, test it alone.

    Args:
        cfg: the composed config of ``conf/config.yaml``.

    Returns:
        What the recipe is judged by, and its value on the test set, such as an accuracy in [0, 1].

    Raises:
        ValueError: a setting is wrong or has no effect, or the data is missing or damaged.
    """
    # A recipe says itself how many workers its data is worth.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # A recipe without validation has no loader for it.
    warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
    # Lightning's own business with PyTorch.
    warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")
    # A recipe's metrics count every example once, whatever the sampler repeats.
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders.*")
    # A recipe does go on in the middle of an epoch: see recipes.task.go_on_reading.
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
    null_for_none(cfg)
    folder = writable(cfg.output_dir)
    check_numbers(cfg)
    refuse_foreign_data(cfg)
    if cfg.ckpt_path is not None:
        if not Path(cfg.ckpt_path).exists():
            raise ValueError(f"ckpt_path={cfg.ckpt_path}: there is no such checkpoint; null begins anew")
        found = read_checkpoint(cfg.ckpt_path)["recipe"]  # before anything else takes its time
        if found != (own := getattr(get_class(cfg.recipe._target_), "recipe", found)):
            raise ValueError(
                f"ckpt_path={cfg.ckpt_path} is of recipe={found}, not of recipe={own}, which this run trains"
            )
    seed_everything(cfg.seed, workers=True)
    data = build(cfg.data)
    model: Task = build(cfg.recipe, **data.dims)
    trainer: Trainer = build(cfg.trainer)
    watching = any(isinstance(logger, WandbLogger) for logger in trainer.loggers)
    trainer.callbacks[:0] = [Recorder(), Outlasted.of(cfg), *([Portrait()] if watching else [])]  # type: ignore[attr-defined]
    if cfg.get("backward"):  # beside those of the trainer, which a command line may replace
        trainer.callbacks.insert(0, build(cfg.backward))  # type: ignore[attr-defined]
    if not cfg.test_only:
        refuse_idle(cfg, trainer, named())
    settings = cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True))
    for logger in trainer.loggers:
        logger.log_hyperparams(settings)
        if isinstance(logger, WandbLogger):
            logger.log_hyperparams(choices())  # one word each, as in a sweep: compressor: topk
    if cfg.test_only:
        return _scored(trainer, model, data, cfg.ckpt_path)
    trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
    go_on_writing(trainer.loggers)
    fitted = dict(trainer.callback_metrics)
    if "run/steps" not in fitted:
        raise ValueError(
            f"not one step was left to train: trainer.max_epochs={trainer.max_epochs}, trainer.max_steps="
            f"{trainer.max_steps}, ckpt_path={cfg.ckpt_path}; raise what ends the training, or null for ckpt_path"
        )
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):  # of spawned processes, what this one has not seen
            logger.so_far = {
                "time/seconds": float(fitted["run/seconds"]),
                "comm/total_bytes_sent": float(fitted["run/total_bytes_sent"]),
            }
    trainer.test(model, datamodule=data, verbose=False)
    facts = {"recipe": model.recipe, "choices": choices(), "seed": cfg.seed, "ranks": trainer.world_size}
    result = describe(model.score, fitted | trainer.callback_metrics, **facts)
    _report(result, folder, getattr(trainer.checkpoint_callback, "best_model_path", ""))
    _close(trainer.loggers)
    return model.score, result["score"]["value"]


def check_numbers(cfg: DictConfig) -> None:
    """Refuse what else would be found, in other words, once processes have started.

    Args:
        cfg: the composed config.

    Raises:
        ValueError: a seed, a learning rate or a number of devices is none.
    """
    if type(cfg.seed) is not int or not 0 <= cfg.seed < 1 << 32:
        raise ValueError(f"seed={cfg.seed}: a whole number from 0 to {(1 << 32) - 1}")
    if cfg.trainer.limit_test_batches == 0:
        raise ValueError("trainer.limit_test_batches=0: a run is judged by its test set; at least 1")
    if cfg.test_only and cfg.ckpt_path is None:
        raise ValueError("test_only=true: give the checkpoint, as in ckpt_path=outputs/.../epoch=9-step=990.ckpt")
    rate = cfg.optimizer.get("lr") if cfg.get("optimizer") else None
    if rate is not None and not (isinstance(rate, int | float) and rate > 0):
        raise ValueError(f"optimizer.lr={rate}: a number above 0")
    devices = cfg.trainer.devices
    listed = str(devices).startswith("[") or "," in str(devices)
    if devices not in ("auto", "-1", -1) and not re.fullmatch(r"[\d\s,\[\]]+" if listed else r"[1-9]\d*", str(devices)):
        raise ValueError(f"trainer.devices={devices}: a whole number of at least 1, a list such as [0,1], or auto")


def choices() -> dict[str, Any]:
    """What was chosen of each config group, such as ``compressor: topk``; empty where Hydra did not start the run."""
    if not HydraConfig.initialized():
        return {}
    made = OmegaConf.to_container(HydraConfig.get().runtime.choices)
    assert isinstance(made, dict)
    return {str(group): choice for group, choice in made.items() if not str(group).startswith("hydra/")}


def refuse_unwritable(arguments: list[str]) -> None:
    """Make the folders of a run, or stop it: Hydra would say in a traceback that it cannot.

    Args:
        arguments: of the command line.

    Raises:
        ValueError: it could not.
    """
    if any(each.startswith("-") and each not in ("-m", "--multirun") for each in arguments):  # --cfg, --help
        return
    given = {key: value.strip("'\"") for key, _, value in (each.partition("=") for each in arguments) if key in FOLDERS}
    for folder in (given.pop("output_dir", "."), *(given.values() or ["."])):
        if "${" in folder:  # what follows is not known yet
            writable(os.path.dirname(folder.split("${")[0]) or ".", make=False)
        else:
            writable(folder)


def refuse_unknown_choice(arguments: list[str]) -> None:
    """Stop a run that chooses what a config group does not have, in a line; Hydra says it in forty.

    Args:
        arguments: of the command line.

    Raises:
        ValueError: there is no such option.
    """
    if any(each.startswith(("--config-dir", "-cd", "hydra.searchpath")) for each in arguments):  # which have others
        return
    for group, _, value in (each.partition("=") for each in arguments):
        known = sorted(path.stem for path in (CONF / group).glob("*.yaml")) if group.isidentifier() else []
        for each in value.split(",") if known else ():
            if re.fullmatch(r"[\w-]+", each) and each not in known:
                said = f"{nearest(each, known)} choose from {', '.join(known)}".lstrip()
                raise ValueError(f"{group}={each}: {said}")


def null_for_none(cfg: DictConfig | ListConfig) -> None:
    """Let the text ``None``, which is what W&B's agent makes of null, be null again."""
    for key in list(cfg) if isinstance(cfg, DictConfig) else range(len(cfg)):
        node: Any = cfg._get_node(key)
        if isinstance(node, DictConfig | ListConfig):
            if not node._is_none() and not node._is_interpolation():
                null_for_none(node)
        elif node._value() == "None":
            cfg[key] = None


def named() -> list[str]:
    """Settings that the command line names, such as ``recipe.heads``; empty where Hydra did not start the run."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return [each.lstrip("+").partition("=")[0] for each in given]


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
    listed = devices.strip(", ").split(",") if isinstance(devices, str) and "," in devices else devices
    one = len(listed) == 1 if isinstance(listed, Sequence) and not isinstance(listed, str) else listed in (1, "1")
    single = one and cfg.trainer.num_nodes == 1
    if mode != RunMode.MULTIRUN or single or cfg.strategy.get("start_method", "popen") != "popen":
        return
    raise ValueError(
        f"--multirun with trainer.devices={devices}, trainer.num_nodes={cfg.trainer.num_nodes}: each process would "
        "start the whole multirun again. Use trainer.devices=1, or strategy.start_method=spawn, or one command per "
        "run: a shell loop, torchrun, or W&B agents (recipes/*/sweeps)"
    )


def _scored(trainer: Trainer, model: Task, data: LightningDataModule, checkpoint: str) -> tuple[Score, float]:
    """Test a checkpoint and print its score."""
    trainer.test(model, datamodule=data, ckpt_path=checkpoint, verbose=False)
    value = float(trainer.callback_metrics[model.score.metric])
    if trainer.is_global_zero:
        print(f"test {model.score.label} {model.score.written(value)}")
    _close(trainer.loggers)
    return model.score, value


def _close(loggers: Sequence[Logger]) -> None:
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.close()


@rank_zero_only
def _report(result: dict[str, Any], folder: Path, checkpoint: str) -> None:
    saving = f", {result['ratio']:.1f} x fewer bytes than float32" if result["ratio"] > 1 else ""
    print(f"test {result['score']['label']} {result['written']}{saving}")
    if checkpoint:
        print(f"try it: python -m recipes.predict {shlex.quote(os.path.relpath(checkpoint))} INPUT")
    write_result(folder, result)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Hydra's entry point; returns what its sweepers minimise: error rates as they are, accuracy and BLEU negated."""
    start_lineage()
    try:
        refuse_multirun(cfg, HydraConfig.get().mode)
        score, value = train(cfg)
    except (ValueError, InstantiationException, ProcessRaisedException) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not (line := in_a_line(error)):
            raise
        sys.exit(line)
    return score.cost(value)


def in_a_line(error: Exception) -> str:
    """A wrong setting or damaged data, as people want to read it; empty: it is something else."""
    cause: BaseException | None = error.__cause__ if isinstance(error, InstantiationException) else error
    if isinstance(cause, TypeError) and (found := re.search(r"unexpected keyword argument '(\w+)'", str(cause))):
        # Hydra's words: Error in call to target 'recipes.lstm_speech.spoken.Spoken': ... full_key: data
        target, setting = str(error).split("'")[1], f"{str(error).rpartition('full_key: ')[2]}.{found[1]}"
        reason = "what sets it, such as an experiment, is for another one"
        cause = ValueError(f"{setting} is no setting of {target}; {reason}; leave one of the two out, or ~{setting}")
    if isinstance(cause, MisconfigurationException):
        fix = " Take fewer trainer.devices, or trainer=cpu_2proc for the CPU" if "gpu" in str(cause) else ""
        cause = ValueError(" ".join(str(cause).split()) + fix)
    elsewhere = isinstance(cause, ProcessRaisedException) or "Original Traceback" in str(cause)
    if elsewhere:  # in a rank, or in a loader's process
        last = str(cause).strip().splitlines()[-1]
        cause = ValueError(last.removeprefix("ValueError: ")) if last.startswith("ValueError: ") else None
    return f"ValueError: {cause} (HYDRA_FULL_ERROR=1 shows where)" if isinstance(cause, ValueError) else ""


if __name__ == "__main__":
    sys.argv[1:] = whole_paths(by_group(sys.argv[1:]))
    try:
        refuse_unknown_choice(sys.argv[1:])
        refuse_unwritable(sys.argv[1:])
    except ValueError as error:
        sys.exit(in_a_line(error))
    main()
