"""What auto chooses over the links of the lab."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.choices import best, chosen


def cell(said=(), **ms):
    return {"ms": ms, "said": list(said), "bounds": []}


def test_the_best_plan_is_one_that_was_asked_for_by_name():
    assert best(cell(DDP=3.0, all_gather=2.0, split_gather=2.5, auto=1.0)) == "all_gather"


def test_what_was_chosen_is_read_from_what_auto_says():
    one = "all_gather: 3 bytes a rank for 5 elements, 1 ms by the cost model (split_gather 2 ms)"
    other = "all_reduce of float32, since all_gather would save too little: 3 bytes a rank for 5 elements"
    assert chosen(cell([one, one])) == "all_gather"
    assert chosen(cell([one, other])) == "all_gather + float32"


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2")
def test_a_cell_is_measured_once(tmp_path):
    path = tmp_path / "choices.json"
    words = "--models resnet20 --rates 1gbit --ranks 2 --steps 2 --rounds 1 --warm 2 --json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.choices", *words.split(), str(path)]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = json.loads(path.read_text())
    assert set(found["ms"]) == {"DDP", "all_gather", "split_gather", "auto"}
    assert all(value > 0 for value in found["ms"].values())
    assert chosen(found) in {"all_gather", "split_gather", "float32", "all_gather + float32", "float32 + all_gather"}
    assert "1 cells" in first
    before = path.stat().st_mtime_ns
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert path.stat().st_mtime_ns == before
    assert "1 cells" in again
