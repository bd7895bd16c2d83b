"""The optimizer benchmark trains, remembers, and compares with dense."""

import json
import sys

import pytest
import torch

from benchmarks import optimizers
from benchmarks.harness import tasks
from benchmarks.harness.methods import METHODS
from lightning_compress.settings.run_state import RunState
from tests.benchmarks.test_error import write_text


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_runs_are_not_repeated(tmp_path, monkeypatch, capfd):
    write_text(tmp_path)
    results = tmp_path / "results.json"
    arguments = ["--root", str(tmp_path), "--json", str(results), "--steps", "4", "--seeds", "0"]
    monkeypatch.setattr(
        sys, "argv", ["optimizers", *arguments, "--methods", "dense", "onebit", "--optimizers", "adamw"]
    )
    optimizers.main()
    found = json.loads(results.read_text())
    assert list(found) == ["adamw 0.01/dense/seed 0/4 steps", "adamw 0.01/onebit/seed 0/4 steps"]
    dense, onebit = found.values()
    assert dense["ratio"] == 1
    assert 15 < onebit["ratio"] < 32
    assert 0 < dense["held_out"] != onebit["held_out"]
    assert dense["training"] < 4
    assert capfd.readouterr().out.count(" steps: held-out loss ") == 2

    monkeypatch.setattr(optimizers, "work", None)  # nothing is left to do
    optimizers.main()
    assert "1.000" in capfd.readouterr().out
    assert json.loads(results.read_text()) == found


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_one(name):
    RunState.of(**METHODS[name])
    for exchange in optimizers.EXCHANGES.values():
        assert RunState.of("none", exchange)


def test_errors_on_images_are_counted(monkeypatch):
    labels = torch.arange(5000) % 10
    monkeypatch.setattr(tasks, "mnist", lambda: (torch.nn.functional.one_hot(labels, 784).float(), labels))
    task = tasks.Digits()
    model = task.model()
    examples = next(task.batches(0, rank=1))
    assert examples.shape == (16, 785)
    assert torch.equal(examples[:, :-1].argmax(1), examples[:, -1].long())
    model.layers = torch.nn.Identity()  # says the pixel, which is the label
    assert task.losses(model, 0, 1).tolist() == [[0, 1000]]
    model.layers = torch.nn.Linear(784, 10, bias=False)
    model.layers.weight.data.zero_()  # says 0, which is a tenth of each share
    assert task.losses(model, 1, 2).tolist() == [[500, 500]]
