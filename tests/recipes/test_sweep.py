"""Sweep files without W&B: what they may say, what the cells become, and what is run again."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.tables import sweep
from recipes.tables.cells import Outcome, overrides, quoted, read_sweep, run
from tests.config.composing import ROOT

WHOLE: dict[str, Any] = {
    "program": "recipes/train.py",
    "method": "grid",
    "metric": {"name": "test/acc", "goal": "maximize"},
    "command": ["${env}", "${interpreter}", "-m", "recipes.train", "logger=wandb", "${args_no_hyphens}"],
    "parameters": {"compressor": {"values": ["topk", "rotated"]}, "exchange.node_size": {"value": None}},
}


def written(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(WHOLE | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metod": "grid"}, "unknown key 'metod'; did you mean method?"),
        ({"parameters": {}}, "parameters is missing"),
        ({"metric": {"name": "test/acc"}}, "metric="),
        ({"parameters": {"seed": {"valeus": [1]}}}, "parameters.seed: unknown key 'valeus'; did you mean values?"),
        ({"parameters": {"recipe": {"parameters": {"depth": {"value": 8}}}}}, "nested parameters"),
        ({"parameters": {"a": {"values": ["x,y"]}}}, "Hydra would take 'x,y' apart"),
        ({"parameters": {"a": {"value": {"b": 1}}}}, "write dotted names"),
        ({"command": ["${env}", "python", "train.py", "${args}"]}, "command must be"),
        (
            {"parameters": {"a": {"min": "1e-4", "max": 0.1}}},
            "'1e-4' is not a number; YAML wants a point in it, as in 1.0e-4",
        ),
        ({"parameters": {"a": {"min": 2, "max": 1}}}, "min=2 is above max=1"),
        ({"parameters": {"a": {"min": 0.5, "max": 2, "distribution": "int_uniform"}}}, "0.5 is not a whole number"),
        ({"parameters": {"a": {"min": 0, "max": 1, "distribution": "log_uniform_values"}}}, "for numbers above 0"),
        ({"method": "anneal"}, "choose grid, random or bayes"),
        ({"parameters": {"compressor": {"values": "topk"}}}, "parameters.compressor: values='topk' is no list"),
        ({"parameters": {"seed": {"values": {"a": 1}}}}, "values={'a': 1} is no list"),
        ({"parameters": {"seed": {"values": 3}}}, "values=3 is no list"),
        ({"run_cap": "3"}, "run_cap='3': at least 1 cell, a whole number"),
        ({"run_cap": True}, "run_cap=True: at least 1 cell"),
    ],
)
def test_what_a_sweep_file_may_not_say(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as info:
        read_sweep(written(tmp_path / "s.yaml", **changes))
    assert "\n" not in str(info.value)


def test_unknown_key_is_one_line_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main([str(written(tmp_path / "s.yaml", metod="grid"))]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_arguments_are_those_of_the_agent(tmp_path: Path) -> None:
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    parsed = read_sweep(written(tmp_path / "s.yaml"))
    cell = {"compressor": "topk", "exchange.node_size": None, "nesterov": True, "lr": 1e-5, "exclude": "['a,b']"}
    theirs = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in cell.items()}})
    assert overrides(parsed, cell) == ["logger=wandb", *theirs["args_no_hyphens"]]
    assert "exchange.node_size=None" in overrides(parsed, cell)


def test_random_cells_are_the_same_each_time(tmp_path: Path) -> None:
    axes = {
        "optimizer.lr": {"min": 1e-4, "max": 1e-1, "distribution": "log_uniform_values"},
        "seed": {"min": 0, "max": 9},
        "compressor": {"values": ["topk", "fft"]},
    }
    path = written(tmp_path / "s.yaml", method="random", parameters=axes)
    first, second = read_sweep(path, count=30).cells(), read_sweep(path, count=30).cells()
    assert first == second != read_sweep(path, count=30, seed=1).cells()
    assert all(1e-4 <= cell["optimizer.lr"] <= 1e-1 and 0 <= cell["seed"] <= 9 for cell in first)
    assert sum(cell["optimizer.lr"] < 1e-2 for cell in first) > 10


def test_a_count_limits_any_sweep(tmp_path: Path) -> None:
    path = written(tmp_path / "s.yaml", parameters={"seed": {"values": [1, 2, 3]}})
    assert [cell["seed"] for cell in read_sweep(path, count=2).cells()] == [1, 2]
    assert len(read_sweep(path).cells()) == len(read_sweep(path, count=9).cells()) == 3
    capped = written(tmp_path / "t.yaml", parameters={"seed": {"values": [1, 2, 3]}}, run_cap=1)
    assert [len(read_sweep(capped, count=count).cells()) for count in (None, 2)] == [1, 2]
    drawn = written(tmp_path / "u.yaml", parameters={"seed": {"values": [1, 2, 3]}}, method="random")
    assert [len(read_sweep(drawn, count=count).cells()) for count in (None, 2)] == [20, 2]
    with pytest.raises(ValueError, match="count=0: at least 1 cell"):
        read_sweep(path, count=0)


RESULT = {
    "score": {"metric": "test/acc", "value": 0.5},
    "metrics": {"test/acc": 0.5, "val/acc": 0.75},
    **dict.fromkeys(sweep.FIGURES, 2.0),
}


def test_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def fake(arguments: list[str], folder: Path) -> Outcome:
        name = next(each for each in arguments if each.startswith("compressor="))
        ran.append(name)
        if name == "compressor=fft" and ran.count(name) == 1:
            raise KeyboardInterrupt
        return Outcome(None, "ValueError: no") if "rotated" in name else Outcome(RESULT, None)

    monkeypatch.setattr(sweep, "run", fake)
    values = ["topk", "rotated", "fft"]
    path = written(tmp_path / "s.yaml", parameters={"compressor": {"values": values}})
    command = [str(path), "--out", str(tmp_path / "out"), "trainer.max_epochs=1"]
    assert sweep.main(command) == 130
    assert sweep.main(command) == 1
    assert ran == ["compressor=topk", "compressor=rotated", "compressor=fft", "compressor=fft"]
    with (tmp_path / "out/cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["compressor"], row["status"]) for row in rows] == [
        ("topk", "done"),
        ("rotated", "failed"),
        ("fft", "done"),
    ]
    assert rows[1]["failure"] == "ValueError: no"
    assert (tmp_path / "out/cells.png").stat().st_size > 1000
    sweep.main([*command, "--again"])
    assert ran[4:] == ["compressor=rotated"]
    sweep.main([*command[:-1], "trainer.max_epochs=2"])
    with (tmp_path / "out/cells.csv").open() as file:
        assert [row["overrides"][-1] for row in csv.DictReader(file)] == [*"111", *"222"]
    other = written(tmp_path / "t.yaml", parameters={"seed": {"value": 1}})
    assert sweep.main([str(other), "--out", str(tmp_path / "out")]) == 1  # a table of another sweep


def test_cells_are_composed_as_they_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run", lambda *_: Outcome(RESULT, None))
    axes = {"strategy": {"value": "gossip"}, "strategy.compressor": {"value": "moniqua"}}
    path = written(tmp_path / "s.yaml", parameters=axes | {"strategy.compressor.bits": {"values": [1, 8]}})
    assert sweep.main([str(path), "--out", str(tmp_path / "out"), "ckpt_path=a/epoch=9-step=1.ckpt"]) == 0


@pytest.mark.parametrize("name", ["compressor", "compressor.nosuch"])
def test_a_cell_that_is_no_config_is_named_before_any_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "run", lambda *_: pytest.fail("a cell was run"))
    path = written(tmp_path / "s.yaml", parameters={"seed": {"value": 1}, name: {"values": ["topk", "nosuch"]}})
    assert sweep.main([str(path), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "is no setting of a run: " in said
    assert "nosuch" in said


@pytest.mark.parametrize("metric", ["test/acc", "val/acc", "val/wer"])
def test_the_table_has_the_metric_of_the_file(metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run", lambda *_: Outcome(RESULT, None))
    path = written(tmp_path / "s.yaml", metric={"name": metric, "goal": "maximize"})
    if metric not in RESULT["metrics"]:  # said after one cell, not after all of them
        with pytest.raises(ValueError, match=r"metric\.name=val/wer is none of test/acc, val/acc; correct it before"):
            sweep.run_cells(read_sweep(path), [], tmp_path / "out")
        return
    rows = sweep.run_cells(read_sweep(path), [], tmp_path / "out")
    assert [(row["metric"], row["value"], row["score"]) for row in rows] == [
        (metric, f"{RESULT['metrics'][metric]:.6g}", "0.5")
    ] * 2


def test_settings_of_wandb_are_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def fake(arguments: list[str], folder: Path) -> Outcome:
        ran.append(arguments)
        return Outcome(RESULT, None)

    monkeypatch.setattr(sweep, "run", fake)
    command = [*WHOLE["command"][:-1], "logger.wandb.project=mine", "+logger.wandb.group=a", "${args_no_hyphens}"]
    path = written(tmp_path / "s.yaml", command=command, parameters={"compressor": {"values": ["topk"]}})
    rows = sweep.run_cells(read_sweep(path), ["trainer=cpu"], tmp_path / "out")
    assert [row["status"] for row in rows] == ["done"]
    assert ran == [["logger=wandb", "compressor=topk", "logger=csv", "trainer=cpu"]]
    with pytest.raises(ValueError, match=r"Could not override 'logger.wandb.project'"):  # where it would do nothing
        sweep.run_cells(read_sweep(path), ["logger.wandb.project=mine"], tmp_path / "out2")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [0, 1])
def test_a_cell_in_a_process_of_its_own(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LIGHTNING_COMPRESS_PARENT", "")
    axes = {"compressor": {"values": ["topk", "topkk"]}, "exchange.node_size": {"value": None}}
    parsed = read_sweep(written(tmp_path / "s.yaml", parameters=axes))
    arguments = overrides(parsed, parsed.cells()[number])
    done = run([*arguments, "debug=fast", "trainer=cpu_2proc", "logger=csv"], tmp_path / "a=b, c")
    if number == 1:
        assert done.result is None
        assert "ValueError: compressor=topkk: did you mean topk? choose from adam_mask, " in str(done.failure)
        return
    assert done.failure is None
    assert done.result is not None
    assert done.result["steps"] == 3
    assert done.result["choices"]["compressor"] == "topk"


def test_a_cell_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "recipes"
    stub.mkdir()
    (stub / "__init__.py").touch()
    (stub / "train.py").write_text("raise ValueError('compressor=topkk: did you mean topk?')")
    monkeypatch.chdir(tmp_path)  # where ``-m`` looks first
    monkeypatch.setenv("LIGHTNING_COMPRESS_PARENT", "")
    done = run(["compressor=topkk"], tmp_path / "a=b, c")
    assert done.result is None
    assert done.failure == "ValueError: compressor=topkk: did you mean topk?"


def test_quoted() -> None:
    assert quoted("/tmp/run-1") == "/tmp/run-1"
    assert quoted("a b's") == "'a b\\'s'"


CHAIN = """
import os, subprocess, sys, time
from recipes.tables.lineage import start_lineage
start_lineage()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(60)
"""
INTERRUPTIBLE = (
    "import ctypes; ctypes.CDLL(None).prctl(1, 2, 0, 0, 0); import signal; signal.signal(2, signal.SIG_IGN);"
)


@pytest.mark.parametrize(
    "more", ["", pytest.param(INTERRUPTIBLE, marks=pytest.mark.skipif(sys.platform != "linux", reason="prctl"))]
)
def test_processes_end_with_the_one_that_started_them(more: str) -> None:
    child = f"import recipes, time; {more} time.sleep(60)"
    environment = {key: value for key, value in os.environ.items() if key != "LIGHTNING_COMPRESS_PARENT"}
    parent = subprocess.Popen([sys.executable, "-c", CHAIN, child], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.7)
    os.kill(pid, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone([pid], 5)


AGENT = """
import os, subprocess, sys, time
os.environ[sys.argv[3]] = "abc"
first = subprocess.Popen(["env", sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(60)
"""


@pytest.mark.parametrize("variable", ["WANDB_SWEEP_ID", "TORCHELASTIC_RUN_ID"])
def test_a_killed_launcher_leaves_nothing_behind(variable: str) -> None:
    child = "import recipes, time; print(__import__('os').getpid(), flush=True); time.sleep(60)"
    ours = ("LIGHTNING_COMPRESS_PARENT", "WANDB_SWEEP_ID", "TORCHELASTIC_RUN_ID")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    first = CHAIN.replace("print(child.pid", "print(os.getpid()")
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, first, child, variable], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    )
    assert agent.stdout is not None
    pids = [int(agent.stdout.readline()) for _ in range(2)]
    assert all(map(_runs, pids))
    agent.kill()
    agent.wait()
    agent.stdout.close()
    assert gone(pids, 5)


def gone(pids: list[int], seconds: float) -> bool:
    """Whether none of the processes is left, zombies aside, within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _runs(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")
