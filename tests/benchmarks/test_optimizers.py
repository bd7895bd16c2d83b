"""The optimizer benchmark trains, remembers, and compares with dense."""

import json
import sys

import pytest

from benchmarks import optimizers
from benchmarks._optimizers import stages, table, training
from lightning_compress.settings.run_state import RunState
from recipes.tables.rows import read_rows
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


def test_methods_that_there_are_not_are_passed_over(monkeypatch):
    monkeypatch.setitem(optimizers.METHODS, "later", {"compressor": "later"})
    monkeypatch.setitem(optimizers.METHODS, "wrong", {"compressor": {"name": "topk", "density": 7}})
    assert optimizers.known("topk 1 %")
    assert not optimizers.known("later")
    with pytest.raises(ValueError, match="density"):
        optimizers.known("wrong")


def test_stages_are_compared(tmp_path, monkeypatch, capsys):
    write_text(tmp_path)
    results = tmp_path / "results.csv"
    small = {
        name: stages.SETTINGS[name] for name in ("dense", "onebit, loco", "adam_mask 2 %, residual", "local 2, onebit")
    }
    for module in (training, table):
        monkeypatch.setattr(module, "SETTINGS", small)
    monkeypatch.setitem(stages.STAGES, "screening", stages.Stage(ranks=2, steps=2, seeds=1))
    monkeypatch.setitem(stages.STAGES, "long", stages.Stage(ranks=2, steps=1, seeds=1, best=1, after="screening"))
    optimizers.run_stage("screening", tmp_path, results, tmp_path / "loss.png")
    optimizers.run_stage("long", tmp_path, results, None)
    rows = read_rows(results)
    assert [row["setting"] for row in rows if row["stage"] == "screening"] == list(small)
    assert next(row["setting"] for row in rows if row["stage"] == "long") == "dense"
    assert sum(row["stage"] == "long" for row in rows) == 2
    by_name = {row["setting"]: row for row in rows if row["stage"] == "screening"}
    assert float(by_name["dense"]["bits"]) == 32
    assert 1 < float(by_name["onebit, loco"]["message_bits"]) < 1.1 < float(by_name["onebit, loco"]["bits"]) < 2
    local = {name: float(by_name["local 2, onebit"][name]) for name in ("message_bits", "bits", "run_bits")}
    assert 0.5 < local["message_bits"] < 0.55 < local["bits"] == local["run_bits"] < 1
    assert float(by_name["local 2, onebit"]["held_out"]) != float(by_name["dense"]["held_out"])
    assert (tmp_path / "loss.png").stat().st_size > 1000
    monkeypatch.setattr(training, "run", None)  # nothing is left to do
    optimizers.run_stage("screening", tmp_path, results, None)
    assert len(read_rows(results)) == len(rows)
    assert "1.000" in capsys.readouterr().out
    page = table.markdown(rows).splitlines()
    assert page[1].count("---") == page[0].count("|") - 1 == 5
    assert [line.split(" | ")[0] for line in page[2:]] == [
        "| local 2, onebit",
        "| adam_mask 2 %, residual",
        "| onebit, loco",
    ]


def test_the_front_has_what_no_other_beats():
    points = {"a": (1.0, 1.2), "b": (2.0, 1.1), "c": (2.0, 1.3), "d": (3.0, 1.1)}
    assert table.pareto(points) == {"a", "b"}


@pytest.mark.parametrize("name", stages.SETTINGS)
def test_every_setting_is_one(name):
    given = training.given_of(stages.SETTINGS[name], 0)
    RunState.of(**{key: each for key, each in given.items() if key not in ("rounds", "outer")})
