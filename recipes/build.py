"""Turn config nodes into objects."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra.utils
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipes.cells import quoted

__all__ = [
    "CONF",
    "TARGETS",
    "build",
    "by_group",
    "composed",
    "options_of",
    "recipe_of",
    "refuse_foreign_data",
    "whole_paths",
]

CONF = Path(__file__).parents[1] / "conf"

TARGETS = ("lightning_compress.*", "recipes.*", "lightning.pytorch.*", "torch.optim.*")
"""What a ``_target_`` may name."""


def by_group(arguments: list[str]) -> list[str]:
    """The command line with ``strategy.compressor``, which stands for the group ``compressor``, by that name.

    Args:
        arguments: such as ``strategy.compressor=moniqua strategy.compressor.bits=1``.
    """
    inner = "strategy.compressor"
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
