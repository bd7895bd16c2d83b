"""Every W&B sweep says what is true, its cells compose, build and train, without W&B."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_compress import CompressedDDPStrategy
from lightning_compress.engine.checks import check_clipping
from recipes.config import build, recipe_of
from recipes.predict import module_of
from recipes.tables.cells import Cell, overrides, read_sweep
from recipes.tables.record import read_result
from recipes.train import train
from tests.config.composing import ROOT, built, composed
from tests.helpers.processes import Pools

SWEEPS = sorted(ROOT.glob("recipes/*/sweeps/*.yaml"))
EMBEDDED = {"resnet": "digits", "lstm_speech": "spoken", "nmt": "numbers"}
"""What each recipe trains on without a download."""
FIRST = {path.parents[1].name: path for path in reversed(SWEEPS)}
"""One sweep of each recipe; the others are thorough."""


def embedded(path: Path) -> list[str]:
    """Overrides that train a sweep's recipe without a download; nobody is left out of these data."""
    nobody = ["~data.leave_out"] if "experiment=speech_fsdd_speaker" in path.read_text() else []
    return [f"data={EMBEDDED[path.parents[1].name]}", *nobody]


def name(path: Path) -> str:
    return f"{path.parents[1].name}-{path.stem}"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")


def one_at_a_time(path: Path) -> list[Cell]:
    """The first cell, and those that differ from it in one parameter: every value of each is in one of them."""
    first, *others = read_sweep(path).cells()
    return [first, *(cell for cell in others if sum(cell[key] != first[key] for key in cell) == 1)]


@pytest.mark.parametrize("path", SWEEPS, ids=name)
def test_file(path: Path) -> None:
    sweep = read_sweep(path)
    recipe = path.parents[1].name
    assert (ROOT / "recipes/train.py").is_file()
    assert f"wandb sweep {path.relative_to(ROOT)}" in path.read_text()
    assert "logger=wandb" in sweep.fixed
    assert recipe_of(composed(*overrides(sweep, sweep.cells()[0])).recipe) == recipe
    score, (metric, goal) = module_of(recipe).score, sweep.metric
    stage, _, figure = metric.partition("/")
    assert stage in ("val", "test")
    assert (figure, goal) in [(score.metric.partition("/")[2], score.goal), ("loss", "minimize")]


def in_turn(path: Path) -> list[Cell]:
    """Those; of the methods that the recipes' ``compressors`` have in common, each is left to one of them."""
    first, *others = one_at_a_time(path)
    if path.stem != "compressors":
        return [first, *others]
    lists = {each: read_sweep(each).axes["compressor"]["values"] for each in SWEEPS if each.name == path.name}
    mine = set()
    for number, method in enumerate(sorted(set().union(*lists.values()))):
        listing = [each for each, methods in lists.items() if method in methods]
        if listing[number % len(listing)] == path:
            mine.add(method)
    return [first, *(cell for cell in others if cell["compressor"] in mine | {first["compressor"]})]


@pytest.mark.parametrize("cells", [in_turn, pytest.param(one_at_a_time, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("path", SWEEPS, ids=name)
def test_cells_compose(path: Path, cells: Callable[[Path], list[Cell]]) -> None:
    sweep = read_sweep(path)
    for cell in cells(path):
        cfg = composed(*overrides(sweep, cell))
        strategy = CompressedDDPStrategy(build(cfg.compressor))
        check_clipping(strategy._settings, cfg.trainer.gradient_clip_val)
        for _, course in strategy._settings.options.schedule.courses:  # of the method's own, in epochs
            assert max(start for start, _ in course.values) < cfg.trainer.max_epochs


@pytest.mark.thorough
@pytest.mark.parametrize("path", SWEEPS, ids=name)
def test_every_cell_builds(path: Path) -> None:
    sweep = read_sweep(path)
    for cell in sweep.cells():
        built(composed(*overrides(sweep, cell), *embedded(path)))


def _marked(path: Path) -> Any:
    return pytest.param(path, id=name(path), marks=[] if path in FIRST.values() else pytest.mark.thorough)


def trained(folder: str, arguments: list[str]) -> tuple[str, float]:
    """The metric of a cell, and its value."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            score, value = train(composed(*arguments))
    finally:
        os.chdir(before)
    return score.metric, value


@pytest.mark.parametrize("path", [_marked(path) for path in SWEEPS])
def test_a_cell_trains(path: Path, tmp_path: Path, pools: Pools) -> None:
    sweep = read_sweep(path)
    recipe = path.parents[1].name
    short = ["debug=fast", "logger=csv", "trainer.accelerator=cpu", "trainer.devices=2", *embedded(path)]
    size = [f"data.batch_size={each}" for each in (8,) if recipe != "nmt"]
    first, second = pools[2].run(trained, str(tmp_path), [*overrides(sweep, sweep.cells()[-1]), *short, *size])
    assert first == second
    assert first[0].startswith("test/")
    assert first[1] >= 0
    result = read_result(tmp_path / "run")
    assert result is not None
    assert result["ratio"] > 1 or "compressor=none" in sweep.fixed
