"""Ask a trained checkpoint about one's own images, wavs or sentences.

    python -m recipes.predict outputs/.../epoch=9-step=390.ckpt "a man rides a horse" "two dogs play"
    python -m recipes.predict outputs/.../epoch=9-step=390.ckpt cat.png

The checkpoint says which recipe it is of; ``--recipe`` insists on one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from recipes.task import Task

__all__ = ["load", "main", "read_checkpoint", "refuse_other_recipe"]

CONF = Path(__file__).parents[1] / "conf" / "recipe"
RECIPES = sorted(path.stem for path in CONF.glob("*.yaml"))


def read_checkpoint(path: str) -> dict[str, Any]:
    """Read a checkpoint of a recipe, as plain data where that is possible.

    Args:
        path: of the file.

    Raises:
        ValueError: it is not there, or is no checkpoint of a recipe.
    """
    if not Path(path).is_file():
        problem = "it is a folder; a checkpoint is a file" if Path(path).is_dir() else "there is no such file"
        raise ValueError(f"checkpoint {path}: {problem}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind, by what the bytes are taken for
        said = "it is damaged, no checkpoint at all, or holds more than plain data, which alone is safe to load"
        raise ValueError(f"checkpoint {path} cannot be read: {said}") from error
    if not isinstance(content, dict) or "state_dict" not in content or "recipe" not in content:
        raise ValueError(f"{path} is no checkpoint of `python -m recipes.train`: it does not say its recipe")
    return content


def refuse_other_recipe(cfg: DictConfig) -> None:
    """Stop a run whose ``ckpt_path`` is of another recipe, before anything else takes its time.

    Args:
        cfg: the composed config.

    Raises:
        ValueError: it is, or there is no such checkpoint.
    """
    if cfg.ckpt_path is None:
        return
    if not Path(cfg.ckpt_path).exists():
        raise ValueError(f"ckpt_path={cfg.ckpt_path}: there is no such checkpoint; null begins anew")
    found = read_checkpoint(cfg.ckpt_path)["recipe"]
    if found != (own := getattr(get_class(cfg.recipe._target_), "recipe", found)):
        raise ValueError(f"ckpt_path={cfg.ckpt_path} is of recipe={found}, not of recipe={own}, which this run trains")


def module_of(recipe: str) -> type[Task]:
    """The class that a recipe trains.

    Raises:
        ValueError: there is no such recipe.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: choose from {', '.join(RECIPES)}")
    target: str = OmegaConf.load(CONF / f"{recipe}.yaml").recipe._target_
    return cast("type[Task]", get_class(target))


def load(path: str, recipe: str | None = None) -> Task:
    """Make the model of a checkpoint ready to predict, on the CPU.

    Args:
        path: of the checkpoint.
        recipe: that it must be of; None: any.

    Raises:
        ValueError: it cannot be read, is of another recipe, or of a model that the recipe no longer makes.
    """
    checkpoint = read_checkpoint(path)
    found = str(checkpoint["recipe"])
    if recipe is not None and found != recipe:
        raise ValueError(f"checkpoint {path} is of recipe={found}, not of recipe={recipe}")
    cls = module_of(found)
    try:
        model = cls(**checkpoint.get("hyper_parameters", {}))
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint["state_dict"])
    except (TypeError, RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())
        raise ValueError(f"checkpoint {path} does not fit recipe={found} of this version: {line[:200]}") from error
    return model.eval()


def main(words: list[str] | None = None) -> int:
    """Print an answer for each input; returns the exit code: 0, or 1 where something could not be read."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a .ckpt file that recipes.train wrote")
    parser.add_argument("inputs", nargs="+", metavar="input", help="path of an image or a wav, or a sentence")
    parser.add_argument("--recipe", choices=RECIPES, help="refuse checkpoints of another one")
    parsed = parser.parse_args(words)
    warnings.filterwarnings("ignore", module="lightning")
    try:
        model = load(parsed.checkpoint, parsed.recipe)
        with torch.inference_mode():
            for source in parsed.inputs:
                answer = model.predict_file(source)
                print(f"{source}: {answer}" if len(parsed.inputs) > 1 else answer, flush=True)
    except (ValueError, OSError) as error:
        print(f"recipes.predict: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
