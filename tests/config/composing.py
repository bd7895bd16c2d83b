"""Compose the repository's config without running it."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig

from recipes.config import build

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


def composed(*overrides: str) -> DictConfig:
    """What ``python -m recipes.train *overrides`` would run, in a folder of its own under the working one."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
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
