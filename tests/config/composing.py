"""Compose the repository's config without running it."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

from hydra import compose, initialize_config_dir
from hydra._internal.config_repository import ConfigRepository
from hydra.plugins.config_source import ConfigResult
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig

from recipes.config import build

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
_read: dict[str, ConfigResult | None] = {}
_load = ConfigRepository.load_config


def _load_once(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Hydra reads a file for each config that it composes."""
    if config_path not in _read:
        _read[config_path] = _load(repository, config_path)
    return copy.deepcopy(_read[config_path])


def composed(*overrides: str) -> DictConfig:
    """What ``python -m recipes.train *overrides`` would run, in a folder of its own under the working one."""
    once = mock.patch.object(ConfigRepository, "load_config", _load_once)
    with once, initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", [*overrides, "output_dir=run"])


def built(cfg: DictConfig) -> tuple[LightningDataModule, LightningModule, Trainer]:
    """Build all that ``recipes.train`` builds."""
    data = build(cfg.data)
    return data, build(cfg.recipe, **data.dims), build(cfg.trainer)


def lay_out(root: Path) -> None:
    """Make of ``data.root`` what data sets look at before a trainer exists."""
    for name in ("cat", "dog"):
        (root / "train" / name).mkdir(parents=True)
    (root / "multi30k").mkdir()
    for part in ("train", "val", "test", "test2016"):
        for language, sentence in (("en", "A dog runs.\nTwo cats sleep."), ("de", "Ein Hund rennt.\nZwei Katzen.")):
            (root / f"{part}.{language}").write_text(sentence)
            (root / "multi30k" / f"{part}.{language}").write_text(sentence)
