"""The optimizer benchmark trains, remembers, and compares with dense."""

import json
import sys

import pytest
import torch

from benchmarks import _muon, optimizers
from benchmarks._language import CharTransformer
from benchmarks.harness import tasks, training
from benchmarks.harness.methods import METHODS
from lightning_compress.periodic.averaged_gradients import AveragedGradients
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

    monkeypatch.setattr(training, "work", None)  # nothing is left to do
    optimizers.main()
    assert "1.0000" in capfd.readouterr().out
    assert json.loads(results.read_text()) == found


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_a_stage_tunes_then_runs_its_cells_and_none_twice(tmp_path, monkeypatch, capfd):
    write_text(tmp_path)
    results = tmp_path / "results.json"
    methods = ("dense", "4 local steps, the rest averaged", "muloco")
    monkeypatch.setattr(_muon, "STAGES", {"muon": (4, (0,), ("decoder",), methods)})
    monkeypatch.setattr(_muon, "TUNED", 2)
    monkeypatch.setattr(_muon, "RATES", (0.02, 0.04))
    monkeypatch.setattr(_muon, "BESIDE", ())
    monkeypatch.setitem(optimizers.RATES, "adamw", (1e-2,))
    monkeypatch.setattr(sys, "argv", ["optimizers", "--root", str(tmp_path), "--json", str(results), "--stage", "muon"])
    optimizers.main()
    found = json.loads(results.read_text())
    assert len(found) == 2 + 1 + 2 + 2
    assert sum(name.endswith("/4 steps/decoder, 4 ranks, all_gather") for name in found) == 2 + 2
    assert "nan" not in capfd.readouterr().out
    monkeypatch.setattr(training, "work", None)  # nothing is left to do
    optimizers.main()
    assert json.loads(results.read_text()) == found


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_adamw_steps_what_is_averaged_and_muon_the_rest():
    model = CharTransformer(50)
    muon, adamw = _muon.MuonAndAdamW(model, 0.02).two
    assert [each.dim() for each in muon.param_groups[0]["params"]] == [2] * 8  # attention's two, and two, in each layer
    taken = AveragedGradients(_muon.REST).trained(model).values()
    assert {*map(id, taken)} == {*map(id, adamw.param_groups[0]["params"])}


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
