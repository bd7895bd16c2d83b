"""The benchmarks for a GPU measure, here on a CPU, and outlive what they measure."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import _timing, gpu, step
from benchmarks._gpu import codecs, codecs_table, echo, isolated, trace
from benchmarks._gpu.machine import surroundings
from lightning_compress import kernels
from tests.benchmarks import tasks

CPU = torch.device("cpu")
CODEC = {"numel": 1000, "device": "cpu", "rounds": 3, "seconds": 0.0}


def test_a_row_has_both_ways_and_the_bytes_that_move(monkeypatch, capsys):
    monkeypatch.setattr(codecs, "Work", _Counted)
    before = kernels.compiler(CPU)
    row = codecs.measure({"codec": "efsign", **CODEC})
    assert kernels.compiler(CPU) == before
    message = 16 + 125  # a mean magnitude, padded, and the bits
    moved = {"encode_sum": 12000 + message, "send": 4000 + message}
    moved |= {"decode": 8000 + message, "decode_8": 8000 + 8 * message}
    for way in codecs.WAYS:
        assert row[way]["message_bytes"] == message
        assert {name: round(1e6 * row[way][name]["gbs"]) for name in moved} == moved  # in a millisecond
    assert row["copy_gbs"] == pytest.approx(8e-3)
    result = {**surroundings(CPU), "rows": [row, {**row, "kernels": {"error": "it broke"}}]}
    codecs_table.show(result)
    said = capsys.readouterr().out
    assert f"{100 * moved['send'] / 8000:.0f} %, 1.0 x" in said
    assert "it broke" in said


class _Counted(_timing.Work):
    """Every call takes a millisecond."""

    def run(self):
        super().run()
        self.ms[-1] = 1.0


@pytest.mark.parametrize("codec", ["dgc", "rows"])
def test_what_is_drawn_anew_may_vary_in_length(codec):
    row = codecs.measure({"codec": codec, **CODEC})
    assert all("ms" in row[way][part] for way in codecs.WAYS for part in codecs_table.PARTS)


def test_what_matters_comes_first_and_nothing_is_forgotten():
    order = codecs_table.by_importance()
    assert order[0] == "onebit"
    assert sorted(order) == sorted(codecs.CASES)


def test_tasks_outlive_each_other():
    given = [{"does": each} for each in ("works", "breaks", "works", "works")]
    works, breaks, *others = isolated.run(tasks.do, given, time.monotonic() + 200, 100)
    assert "illegal" in breaks["error"]
    assert others[0]["pid"] == others[1]["pid"] != works["pid"]
    (died,) = isolated.run(tasks.do, [{"does": "dies"}], time.monotonic() + 200, 100)
    assert died["error"] == "the process died"
    late = isolated.run(tasks.do, [{"does": "hangs"}, {"does": "works"}], time.monotonic() + 0.5, 100)
    assert ["s" in row["error"] for row in late] == [True, True]


def test_a_method_that_breaks_the_device_is_left_out_the_next_time(monkeypatch):
    given = []

    def pretend(function, tasks, deadline, limit):
        given.extend(task["methods"] for task in tasks)
        for task in tasks:
            yield {**task, "broken": "topk"} if "topk" in task["methods"] else task

    monkeypatch.setattr(isolated, "run", pretend)
    task = {"model": "lstm", "precision": "tf32", "methods": ["none", "topk"]}
    assert len(list(step.rows([task], 0.0))) == 2
    assert given == [["none", "topk"], ["none"]]


def test_an_echo_is_all_ranks():
    collective = echo.EchoCollective(3)
    own = torch.arange(16, dtype=torch.uint8)
    gathered = torch.empty(3, 16, dtype=torch.uint8)
    collective.all_gather(own, gathered)
    assert gathered.tolist() == [own.tolist()] * 3
    received = torch.empty(3, 5, dtype=torch.uint8)
    collective.all_to_all(torch.arange(15, dtype=torch.uint8).view(3, 5), received)
    assert received.tolist() == [[5, 6, 7, 8, 9]] * 3  # row 0, for the rank itself, is not always encoded
    total = torch.ones(2)
    collective.all_reduce(total)
    assert total.tolist() == [3, 3]


def test_overlap_is_that_of_the_second_busiest_stream(tmp_path):
    def event(stream, start, length, category="kernel"):
        return {"cat": category, "ts": start, "dur": length, "args": {"stream": stream}}

    events = [event(7, 0, 100), event(7, 50, 100), event(20, 140, 40), event(20, 10, 10, "gpu_memcpy")]
    events += [event(21, 0, 5), {"cat": "cpu_op", "ts": 0, "dur": 900, "args": {}}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = trace.overlap(path)
    assert found == {"main_ms": 0.15, "side_ms": 0.05, "overlapped": pytest.approx(0.4), "launches": 2}
    path.write_text(json.dumps({"traceEvents": events[:1]}))
    assert trace.overlap(path) == {}


def test_steps_are_measured(tmp_path, monkeypatch, capsys):
    out = tmp_path / "step.json"
    theirs = ["PyTorch bf16", "PyTorch PowerSGD 1"]
    given = ["--device", "cpu", "--small", "--models", "lstm", "--precisions", "tf32", "--seconds", "100"]
    given += [
        "--methods",
        "none",
        "onebit",
        "powersgd",
        *theirs,
        "--json",
        str(out),
        "--trace",
        str(tmp_path / "trace.json.gz"),
    ]
    monkeypatch.setattr(sys, "argv", ["step", *given])
    monkeypatch.setattr(
        isolated, "run", lambda function, given, *_: [function(task | {"seconds": 0}) for task in given]
    )
    with kernels.using("torch"):
        step.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["measured"].keys() == {"none", "onebit", "powersgd", *theirs}
    for found in row["measured"].values():
        assert found["ms"] > 0
        assert found["finite"]
        assert len(found["blocks"]) == 3
    assert row["measured"]["none"]["overhead"] == 0
    assert (tmp_path / "trace.json.gz").exists()
    said = capsys.readouterr().out
    assert "powersgd" in said
    assert "no second stream" in said


def _parts(monkeypatch, folder, *given):
    scripts = {"tests": ["import sys; print('before'); sys.exit(3)", "print('after')"], "codecs": ["input()"]}
    scripts |= {"step": ["import time; print('begun', flush=True); time.sleep(60)"], "train": ["print('trained')"]}

    def make(part, seconds, out, data, codecs):
        return [["-c", script] for script in scripts[part]]

    monkeypatch.setattr(gpu, "SHARES", {"tests": 1000, "codecs": 1000, "step": 1, "train": 1000})
    monkeypatch.setattr(sys, "argv", ["gpu", "--seconds", "900", "--out", str(folder), *given])
    gpu.main(make)


def test_a_part_that_fails_or_hangs_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    _parts(monkeypatch, tmp_path)
    said = capsys.readouterr().out
    assert "before\nafter" in said
    assert "begun" in said
    assert "trained" in said
    assert "tests: 3, 0; codecs: 1; step: ended, out of time; train: 0" in said


def test_a_part_that_was_named_and_failed_is_an_exit_status(tmp_path, monkeypatch, capsys):
    _parts(monkeypatch, tmp_path, "--part", "train")
    with pytest.raises(SystemExit) as ended:
        _parts(monkeypatch, tmp_path, "--part", "codecs", "train")
    assert ended.value.code == 1
    assert "ended with codecs: 1; train: 0" in capsys.readouterr().out


TERMINATED = """
import sys
from benchmarks import gpu
sys.argv = ["gpu", "--part", "step", "--seconds", "60", "--out", sys.argv[1]]
gpu.main(lambda *_: [["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(50)"]])
"""


def test_who_is_terminated_leaves_no_part_behind(tmp_path):
    root = Path(gpu.__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", TERMINATED, str(tmp_path)], cwd=root)
    text = tmp_path / "step.txt"
    end = time.monotonic() + 60
    while not (text.exists() and text.read_text().endswith("\n")):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(text.read_text()), 0)


def test_commands_are_told_where_and_how_long(tmp_path):
    (codec,) = gpu.commands("codecs", 99.0, tmp_path, tmp_path, "onebit,efsign")
    assert codec == [
        "-m",
        "benchmarks.codecs",
        "--seconds",
        "99",
        "--json",
        f"{tmp_path}/codecs.json",
        "--device",
        "cuda",
        "--codecs",
        "onebit,efsign",
    ]
    files = {}
    for part in ("kernels", "tests", "large"):
        (command,) = gpu.commands(part, 99.0, tmp_path, tmp_path)
        assert "--session-timeout=79" in command
        files[part] = {Path(each).name for each in command if Path(each).exists()}
    assert files["large"] == {"test_large.py"}
    assert {"test_exchanges.py", "test_hook.py"} <= files["tests"]
    assert "test_large.py" not in files["tests"]
    assert "triton" in files["kernels"]
    (training,) = gpu.commands("train", 99.0, tmp_path, tmp_path / "data")
    assert training[-2:] == ["--data", str(tmp_path / "data")]
