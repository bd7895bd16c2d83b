"""Recipes whose minibatch is searched: the steps follow, and schedules count epochs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from recipes.train import train as run_recipe
from tests.config.composing import composed

SEARCH = ["trainer=cpu", "minibatch=search", "minibatch.epochs=1", "minibatch.margin=1000.0", "minibatch.probe=8"]
RECIPES = {
    "resnet": ["recipe.depth=8", "data.batch_size=16", "recipe.warmup_epochs=1.0", "recipe.reference_batch=8"],
    "lstm_speech": ["recipe.layers=1", "recipe.hidden=8", "data.train_size=256", "data.val_size=2", "data.test_size=2"],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_grow_and_rates_with_them(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = [f"recipe={recipe}", *RECIPES[recipe], *SEARCH, "minibatch.largest=2", "trainer.max_epochs=4"]
    run += ["recipe.schedule=linear", "trainer.limit_train_batches=8", "trainer.log_every_n_steps=1"]
    run_recipe(composed(*run, "trainer.enable_progress_bar=false"))
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    sizes = [
        float(row["minibatch/accumulate_grad_batches"]) for row in rows if row["minibatch/accumulate_grad_batches"]
    ]
    assert sizes == [2, 2, 2]
    assert max(int(row["step"]) for row in rows if row["train/loss"]) == 8 + 3 * 4 - 1
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=False)["lr_schedulers"][0]
    assert state["last_epoch"] == 4  # epochs, not steps
    assert state["base_lrs"][0] == pytest.approx(2 * 0.1)
    assert state["_last_lr"][0] == pytest.approx(0.0)


def test_a_warm_up_in_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = [
        "recipe=nmt",
        "optimizer=sgd",
        "recipe.warmup_steps=2",
        "data.vocab_size=150",
        *SEARCH,
        "data.train_size=200",
        "trainer.log_every_n_steps=1",
    ]
    with pytest.raises(ValueError, match=r"recipe\.warmup_steps=2: with minibatch=search, schedules count epochs"):
        run_recipe(composed(*run))
