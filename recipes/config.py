"""The config of a run: composed, checked before anything takes its time, and turned into objects."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import hydra.utils
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.multiprocessing.spawn import ProcessRaisedException

from recipes.tables.record import writable

__all__ = [
    "CONF",
    "TARGETS",
    "build",
    "by_group",
    "check_numbers",
    "check_types",
    "checked",
    "choices",
    "composed",
    "in_a_line",
    "named",
    "nearest",
    "null_for_none",
    "options_of",
    "quoted",
    "recipe_of",
    "refuse_foreign_data",
    "refuse_multirun",
    "refuse_unknown_choice",
    "refuse_unwritable",
    "whole_paths",
]


CONF = Path(__file__).parents[1] / "conf"

TARGETS = ("lightning_compress.*", "recipes.*", "lightning.pytorch.*", "torch.optim.*")
"""What a ``_target_`` may name."""
_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
}
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "output_dir")
"""Settings that are folders to write to."""


def by_group(arguments: list[str]) -> list[str]:
    """The command line with ``strategy.compressor``, which stands for the group ``compressor``, by that name.

    Args:
        arguments: such as ``strategy.compressor=moniqua strategy.compressor.bits=1``.
    """
    inner = "strategy.compressor"
    chosen = [CONF / f"{each.replace('=', '/', 1)}.yaml" for each in arguments if each.startswith("strategy=")][-1:]
    if any("compressor: ${compressor}" not in path.read_text() for path in chosen if path.exists()):
        return arguments  # the strategy has its own
    named = {path.stem for path in (CONF / "compressor").glob("*.yaml")}
    if not any(key == inner and value in named for key, _, value in (each.partition("=") for each in arguments)):
        return arguments
    starts = (f"{inner}=", f"{inner}.")
    return [each.removeprefix("strategy.") if each.startswith(starts) else each for each in arguments]


def whole_paths(arguments: list[str]) -> list[str]:
    """The command line with checkpoints' names quoted: they hold a ``=``, which Hydra takes for an end.

    Args:
        arguments: such as ``ckpt_path=outputs/epoch=9-step=390.ckpt``.
    """
    start = "ckpt_path="
    bare = [each.startswith(start) and "=" in each[len(start) :] and not set("'\"\\") & set(each) for each in arguments]
    return [start + quoted(each[len(start) :]) if so else each for each, so in zip(arguments, bare, strict=True)]


def composed(overrides: Sequence[str]) -> DictConfig:
    """The config of such a command line, with Hydra's own; what does not compose raises Hydra's own errors."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", whole_paths(by_group(list(overrides))), return_hydra_config=True)


def build(cfg: DictConfig, **kwargs: Any) -> Any:
    """Instantiate ``cfg``, its children first; lists and mappings inside become native ones.

    Args:
        cfg: a node with ``_target_``.
        **kwargs: arguments beyond those of ``cfg``, stronger than them.

    Returns:
        The object, or a ``functools.partial`` of it where ``_partial_: true``.
    """
    whitelist = getattr(hydra.utils, "target_whitelist", None)  # from Hydra 1.4 on
    with whitelist(TARGETS) if whitelist else nullcontext():
        return hydra.utils.instantiate(cfg, _convert_="all", **kwargs)


def recipe_of(node: Any) -> str | None:
    """The recipe whose folder holds what a config node names, such as ``resnet``; None: it is no recipe's.

    Args:
        node: a node with ``_target_``.
    """
    package, *path = str(node.get("_target_")).split(".")
    return path[0] if package == "recipes" and len(path) > 1 else None


def options_of(recipe: str | None) -> list[str]:
    """Hydra's names of the models in a recipe's folder: ``alexnet`` and ``resnet`` of the latter."""
    files = sorted((CONF / "recipe").glob("*.yaml"))
    return [path.stem for path in files if recipe_of(OmegaConf.load(path).recipe) == recipe]


def refuse_foreign_data(cfg: DictConfig) -> None:
    """Stop a recipe that would train on another recipe's data.

    Args:
        cfg: the composed config.

    Raises:
        ValueError: the data is of another recipe.
    """
    recipe, owner, model = recipe_of(cfg.recipe), recipe_of(cfg.data), cfg.recipe.get("_target_")
    if not owner or owner == recipe:
        return
    files = sorted((CONF / "data").glob("*.yaml"))
    own = [path.stem for path in files if recipe_of(OmegaConf.load(path)) == recipe]
    chosen = next(
        (each for each in options_of(recipe) if OmegaConf.load(CONF / f"recipe/{each}.yaml").recipe._target_ == model),
        recipe,
    )
    raise ValueError(
        f"data: {cfg.data._target_} is of recipe={' or '.join(options_of(owner)) or owner}, and recipe={chosen} cannot "
        f"read it; leave it out, or choose data={', '.join(own)}"
    )


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
    if cfg.trainer.limit_train_batches == 0 and not cfg.test_only:
        raise ValueError("trainer.limit_train_batches=0: nothing would be trained; at least 1, or test_only=true")
    if cfg.test_only and cfg.ckpt_path is None:
        raise ValueError("test_only=true: give the checkpoint, as in ckpt_path=outputs/.../epoch=9-step=990.ckpt")
    rate = cfg.optimizer.get("lr") if cfg.get("optimizer") else None
    if rate is not None and not (type(rate) in (int, float) and rate > 0):
        raise ValueError(f"optimizer.lr={rate}: a number above 0")
    devices = cfg.trainer.devices
    listed = str(devices).startswith("[") or "," in str(devices)
    if devices not in ("auto", "-1", -1) and not re.fullmatch(r"[\d\s,\[\]]+" if listed else r"[1-9]\d*", str(devices)):
        raise ValueError(f"trainer.devices={devices}: a whole number of at least 1, a list such as [0,1], or auto")


def check_types(cfg: DictConfig) -> None:
    """Refuse values of another type than the class says that takes them; those of other than plain types are its own.

    Args:
        cfg: the composed config.

    Raises:
        ValueError: there is one.
    """
    for group in ("data", "recipe", "trainer", "optimizer"):
        node: Any = cfg.get(group) or {}
        written: Any = OmegaConf.to_container(node, resolve=False) if node else {}
        bases = hydra.utils.get_class(node["_target_"]).__mro__ if node else ()
        made = [vars(base)["__init__"] for base in reversed(bases) if "__init__" in vars(base)]
        hints = {name: hint for each in made for name, hint in get_type_hints(each).items()}
        for name in [each for each in written if each in hints]:
            kinds = get_args(hints[name]) if get_origin(hints[name]) in (Union, UnionType) else (hints[name],)
            if not _PLAIN.keys() >= set(kinds):
                continue
            value, source = node[name], re.fullmatch(r"\$\{([\w.]+)\}", str(written[name]))
            if type(value) not in kinds and not (type(value) is int and float in kinds):
                setting = source[1] if source else f"{group}.{name}"
                wanted = [_PLAIN[each] for each in kinds if each is not int or float not in kinds]
                raise ValueError(f"{setting}={value}: {' or '.join(wanted)}")


def choices() -> dict[str, Any]:
    """What was chosen of each config group, such as ``compressor: topk``; empty where Hydra did not start the run."""
    if not HydraConfig.initialized():
        return {}
    made = OmegaConf.to_container(HydraConfig.get().runtime.choices)
    assert isinstance(made, dict)
    return {str(group): choice for group, choice in made.items() if not str(group).startswith("hydra/")}


def named() -> list[str]:
    """Settings that the command line names, such as ``recipe.heads``; empty where Hydra did not start the run."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return [each.lstrip("+").partition("=")[0] for each in given]


def null_for_none(cfg: DictConfig | ListConfig) -> None:
    """Let the text ``None``, which is what W&B's agent makes of null, be null again."""
    for key in list(cfg) if isinstance(cfg, DictConfig) else range(len(cfg)):
        node: Any = cfg._get_node(key)
        if isinstance(node, DictConfig | ListConfig):
            if not node._is_none() and not node._is_interpolation():
                null_for_none(node)
        elif node._value() == "None":
            cfg[key] = None


def checked(arguments: list[str]) -> list[str]:
    """A command line as Hydra is to read it; what Hydra would say in forty lines ends the program in one.

    Args:
        arguments: of the command line.
    """
    arguments = whole_paths(by_group(arguments))
    try:
        refuse_unknown_choice(arguments)
        refuse_unwritable(arguments)
    except ValueError as error:
        sys.exit(in_a_line(error))
    return arguments


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
                said += f", or leave it out by ~{group}" * (each == "null" and _may_lack(group))
                raise ValueError(f"{group}={each}: {said}")


def _may_lack(group: str) -> bool:
    """Whether a run may have none of a config group."""
    defaults: Any = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml").defaults)
    return {group: None} in defaults


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


def nearest(name: str, known: Sequence[str]) -> str:
    """A question that names what is written most like it; empty where nothing is."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else ""


def quoted(value: str) -> str:
    """A text as Hydra reads it whole, whatever is in it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'" if re.search(r"[^\w./-]", value) else value
