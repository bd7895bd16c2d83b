"""The optimizer benchmark trains, remembers, and compares with dense."""

import json
import sys

import pytest

from benchmarks import optimizers
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
