"""Every cell of every W&B sweep composes and builds, without W&B."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.config.composing import ROOT, built, composed

SWEEPS = sorted(ROOT.glob("recipes/*/sweeps/*.yaml"))


def read(path: Path) -> dict[str, Any]:
    sweep = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(sweep, dict)
    return sweep


def cells(sweep: dict[str, Any]) -> list[list[str]]:
    """Overrides of every grid cell, formed as W&B's ``${args_no_hyphens}`` forms them."""
    axes = [[f"{key}={value}" for value in axis["values"]] for key, axis in sweep["parameters"].items()]
    return [list(cell) for cell in itertools.product(*axes)]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_command(path: Path) -> None:
    sweep = read(path)
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["command"][:4] == ["${env}", "${interpreter}", "-m", "recipes.train"]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    assert sweep["metric"]["name"] in ("val/acc", "test/acc", "test/wer", "test/bleu")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_cell(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    sweep = read(path)
    for cell in cells(sweep):
        built(composed(*sweep["command"][4:-1], *cell))
