"""The benchmark of sharded models trains, remembers, and compares with dense."""

import json
import sys

import pytest

from benchmarks import sharded
from benchmarks.harness import training
from tests.benchmarks.test_error import write_text


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_runs_are_not_repeated(tmp_path, monkeypatch, capfd):
    write_text(tmp_path)
    results = tmp_path / "results.json"
    arguments = ["--root", str(tmp_path), "--json", str(results), "--steps", "4", "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", ["sharded", *arguments, "--methods", "onebit"])
    sharded.main()
    found = json.loads(results.read_text())
    assert list(found) == ["dense/seed 0/4 steps", "onebit/seed 0/4 steps"]
    dense, onebit = found.values()
    assert dense["ratio"] == 1
    assert 10 < onebit["ratio"] < 32
    assert 0 < dense["held_out"] != onebit["held_out"]

    monkeypatch.setattr(training, "work", None)  # nothing is left to do
    capfd.readouterr()
    sharded.main()
    assert "1.0000" in capfd.readouterr().out
    assert json.loads(results.read_text()) == found
