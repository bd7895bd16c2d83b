"""The table of comparisons, and going on where it stopped; trainings are only pretended."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from omegaconf import OmegaConf

from lightning_compress import CompressedDDPStrategy
from recipes.config import build
from recipes.tables import results, results_page
from recipes.tables.results import Comparison, Run, main, read_rows, read_table
from tests.config.composing import ROOT, composed

TABLE = read_table()
PLOT = results_page.plot
SMALL = """
first:
  title: The first
  run: [trainer.max_epochs=9]
  data: ["output_dir={data}"]
  needs: pictures
  quick: [trainer.max_epochs=2]
  seeds: [0, 1]
  methods:
    dense: [compressor=none]
    topk 1 %: [compressor=topk, compressor.density=0.01]
second:
  title: The second
  run: [trainer.max_epochs=3]
  quick: [trainer.max_epochs=1]
  seeds: [0]
  more_seeds: {dense: [2]}
  methods:
    dense: [compressor=none]
"""


@pytest.mark.parametrize("comparison", TABLE, ids=lambda each: each.name)
def test_every_run_composes(comparison: Comparison) -> None:
    assert next(iter(comparison.methods.values())) == ["compressor=none"]
    quick = comparison.shortened().runs(None)[-1:] if comparison.quick else []
    own = comparison.methods not in [each.methods for each in TABLE[: TABLE.index(comparison)]]
    every = [*quick, *comparison.runs(Path("data"))[: len(comparison.methods) if own else 1]]
    for run in every:
        cfg = composed(*run.overrides, *run.private, *results.QUIET)
        OmegaConf.resolve(cfg)
        assert cfg.trainer.devices == 2
        method = composed(*run.overrides, *results.SHORT)
        assert not CompressedDDPStrategy(
            build(method.compressor), schedule=method.strategy.schedule
        )._settings.options.schedule.courses
    more = sum(map(len, comparison.more_seeds.values()))
    assert len({run.command for run in comparison.runs(None)}) == len(comparison.seeds) * len(comparison.methods) + more


def test_there_are_enough_methods_for_each_recipe() -> None:
    most: dict[str, int] = {}
    for each in TABLE:
        recipe = str(composed(*each.runs(Path("data"))[0].overrides).recipe._target_).split(".")[1]
        most[recipe] = max(most.get(recipe, 0), len(each.methods))
    assert all(count >= 9 for count in most.values()), most


class Pretended:
    """In place of trainings: what was started, and what is to fail."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.failing = ""

    def __call__(self, run: Run) -> dict[str, Any]:
        if self.failing and self.failing in run.command:
            raise RuntimeError(f"{run.command}: it failed")
        self.commands.append(run.command)
        sparse = "topk" in run.command
        row = {"recipe": "resnet", "data": "digits", "method": run.method, "settings": shlex.join(run.settings)}
        row |= {"seed": run.seed, "ranks": 2, "steps": 9, "metric": "accuracy", "goal": "maximize", "unit": "%"}
        row |= {"bytes_per_step": 100, "ratio": 50} if sparse else {"bytes_per_step": 5000, "ratio": 1}
        row |= {"val_loss": "" if run.comparison == "second" else 2 + sparse + run.seed}
        row |= {"score": 90 + run.seed - sparse, "step_ms": 7.5, "seconds": 1, "versions": "torch 2"}
        return row | {"date": "2026-01-02", "command": run.command}


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """A small table in place of the real one, and neither trainings nor plots."""
    monkeypatch.setattr(results_page, "plot", lambda *_: None)
    (tmp_path / "table.yaml").write_text(SMALL)
    (tmp_path / "pictures").mkdir()
    monkeypatch.setattr(results, "read_table", lambda: read_table(tmp_path / "table.yaml"))
    monkeypatch.setattr(results, "run_one", pretended := Pretended())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return pretended


def test_goes_on_where_it_stopped(tmp_path: Path, trained: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    trained.failing = "topk compressor.density=0.01 seed=0"
    assert main(told) == 1
    start = "python -m recipes.train trainer=cpu_2proc trainer.max_epochs"
    assert trained.commands == [
        f"{start}=9 compressor=none seed=0",
        f"{start}=3 compressor=none seed=0",  # seed 0 of everything comes first
        f"{start}=9 compressor=none seed=1",
        f"{start}=9 compressor=topk compressor.density=0.01 seed=1",
        f"{start}=3 compressor=none seed=2",  # of dense alone
    ]
    assert "it failed" in capsys.readouterr().out
    trained.failing, trained.commands = "", []
    assert main(told) == 0
    assert trained.commands == [f"{start}=9 compressor=topk compressor.density=0.01 seed=0"]
    assert main(told) == 0
    assert len(trained.commands) == 1
    assert len(read_rows(tmp_path / "out/first.csv")) == 4
    assert len(read_rows(tmp_path / "out/second.csv")) == 2


def test_page(tmp_path: Path, trained: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "plot", PLOT)
    told = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    main(told)
    page = (tmp_path / "out/recipes.md").read_text()
    assert "| dense | 90.00, 91.00 | 90.50 | +0.00 | 2.5000 | +0.0 % | 5,000 | 1.0 x | 8 |" in page
    assert "| topk 1 % | 89.00, 90.00 | 89.50 | -1.00 | 3.5000 | +41.7 % | 100 | 50.0 x | 8 |" in page
    assert "Seeds 0, 1; 2 ranks; 9 steps; the higher the better. 2026-01-02; torch 2." in page
    assert "Seed 0, and 2 of dense; 2 ranks" in page
    assert "    python -m recipes.train trainer=cpu_2proc trainer.max_epochs=9 compressor=none\n" in page
    others = (
        "for the other rows, in place of the compressor:\n\n- topk 1 %: `compressor=topk compressor.density=0.01`\n\n|"
    )
    assert "| dense | 90.00, 92.00 | 91.00 | +0.00 |  |  | 5,000" in page  # the second logs no validation loss
    assert others in page
    assert page.count("for the other rows") == 1  # the second has none
    assert (tmp_path / "out/first.png").read_bytes()[:4] == b"\x89PNG"
    rows = read_rows(tmp_path / "out/first.csv")
    results.write_rows(tmp_path / "out/first.csv", [row for row in rows if row["seed"] == "1" or row["ratio"] == "1"])
    assert main([*told, "--page"]) == 0
    page = (tmp_path / "out/recipes.md").read_text()
    assert "1 of 4 runs are still missing" in page
    assert "| topk 1 % | 90.00 | 90.00 | -1.00 |" in page  # against dense of the same seed
    assert len(trained.commands) == 6


def test_times_are_measured_again(tmp_path: Path, trained: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    main(told)
    timed: list[str] = []

    def train(run: Run, more: list[str]) -> dict[str, Any]:
        timed.append(run.command)
        assert {"strategy.schedule=none", "strategy.warmup_steps=null"} <= set(more)
        score = {"label": "accuracy", "goal": "maximize"}
        costs = {
            "ranks": 2,
            "steps": 70.0,
            "bytes_per_step": 5.0,
            "ratio": 1.0,
            "step_ms": 3.0 + ("topk" in run.command),
        }
        return {"score": score, "written": "50.00 %", "metrics": {"val/loss": 1.0}, **costs}

    monkeypatch.setattr(results, "train", train)
    assert main([*told, "--time"]) == 0
    assert len(timed) == 3  # one seed of each method
    rows = read_rows(tmp_path / "out/first.csv")
    assert {row["step_ms"] for row in rows if row["method"] == "dense"} == {"3.0"}
    assert {row["step_ms"] for row in rows if row["method"] == "topk 1 %"} == {"4.0"}
    assert {row["score"] for row in rows} == {"89", "90", "91"}  # all else is as it was


def test_quick_needs_no_data(tmp_path: Path, trained: Pretended) -> None:
    assert main(["--quick", "--out", str(tmp_path / "out"), "--only", "first"]) == 0
    assert [command.split()[4] for command in trained.commands] == ["trainer.max_epochs=2"] * 2


@pytest.mark.parametrize(("given", "words"), [("quick=true", ["--quick"]), ("DATA=sets", ["--data", "sets"])])
def test_make_gives_no_more_than_is_needed(given: str, words: list[str]) -> None:
    command = ["make", "-n", "--no-print-directory", "results", given]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == [".venv/bin/python", "-m", "recipes.tables.results", *words]


def test_data_that_is_not_there_is_named(
    tmp_path: Path, trained: Pretended, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "out")]) == 0
    assert "first is left out: it needs --data, a folder with pictures" in capsys.readouterr().out
    assert len(trained.commands) == 2
    assert main(["--out", str(tmp_path / "out"), "--only", "first"]) == 1
    assert main(["--out", str(tmp_path / "out"), "--data", str(tmp_path / "no")]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_wrong_names(tmp_path: Path, trained: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out"), "--only", "third"]) == 1
    assert capsys.readouterr().err == "--only third: choose from first, second\n"
    (tmp_path / "table.yaml").write_text(SMALL.replace("  run:", "  fast:"))
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "table.yaml, first: unknown fast, no run" in capsys.readouterr().err
    (tmp_path / "table.yaml").write_text(SMALL.replace("{dense: [2]}", "{topk: [2]}"))
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "table.yaml, second: more_seeds of topk; its methods: dense" in capsys.readouterr().err
    (tmp_path / "table.yaml").write_text(SMALL.replace("compressor.density", "compressor.nosuch"))
    with pytest.raises(Exception, match="nosuch"):
        main(["--out", str(tmp_path / "out"), "--data", str(tmp_path)])
    assert not trained.commands  # before hours are spent


def test_what_ends_a_run_is_told_in_a_line(
    tmp_path: Path, trained: Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("python -m recipes.train: ValueError: no")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    told = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*told, "--page", "--time"]) == 1
    monkeypatch.setattr(results, "train", fail)
    assert main([*told, "--time"]) == 1
    monkeypatch.setattr(results, "run_one", interrupt)
    assert main(told) == 130
    assert [line.split(":")[0].split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "--page runs nothing",
        "python -m recipes.train",
        "interrupted; the same command goes on from here",
    ]


def test_two_at_once_are_refused(tmp_path: Path, trained: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(tmp_path / ".lock"):
        assert main(["--out", str(tmp_path)]) == 1
    assert "another python -m recipes.tables.results" in capsys.readouterr().err
