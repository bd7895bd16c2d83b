"""What auto chooses over the links of the lab."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks._network.choosing import best, chosen, over, predicted_ms
from benchmarks.choices import show


def cell(said=(), **ms):
    return {"ms": ms, "said": list(said), "bounds": []}


def test_the_best_plan_is_one_that_was_asked_for_by_name():
    assert best(cell(DDP=3.0, all_gather=2.0, split_gather=2.5, auto=1.0)) == "all_gather"


def test_what_was_chosen_is_read_from_what_auto_says():
    one = "all_gather: 3 bytes a rank for 5 elements, 1 ms by the cost model (split_gather 2 ms)"
    other = "all_reduce of float32, since all_gather would save too little: 3 bytes a rank for 5 elements"
    assert chosen(cell([one, one])) == "all_gather"
    assert chosen(cell([one, other])) == "all_gather + float32"


def test_a_choice_that_is_the_best_plan_is_not_over_it():
    line = "all_gather: 3 bytes a rank for 5 elements, 1 ms by the cost model (split_gather 2 ms)"
    same = cell([line], DDP=3.0, all_gather=2.0, auto=2.4)
    assert over(same, best(same)) == 1.0
    assert over(same, "DDP") == pytest.approx(0.8)
    dense = cell(["all_reduce of float32, since all_gather would save too little: 3 bytes"], DDP=3.0, auto=3.3)
    assert over(dense, "DDP") == 1.0


def test_a_prediction_hides_exchanges_beside_backward():
    model = "all_gather: 9 bytes a rank for {} elements, {} ms by the cost model, {} of them computing (…)"
    lines = [model.format(*each) for each in [(100, 7.0, 1.0), (25, 1.0, 0.5), (75, 2.0, 1.5)]]
    assert predicted_ms(lines, 100, 30.0) == pytest.approx(10 + 20 + 2.0 + 0.5)  # only the first group's travels beside
    assert predicted_ms(lines[:1], 100, 30.0) == pytest.approx(10 + 20 + 7)


def test_what_is_printed_says_how_much_is_noise(capsys):
    named = {"model": "mlp", "rate": "1gbit", "ranks": 2, "compressor": "topk", "noise": {"DDP": 1.5, "auto": 1.1}}
    show([cell(DDP=30.0, all_gather=20.0, auto=21.0) | named | {"predicted_ms": off} for off in (20.0, 30.0)])
    said = capsys.readouterr().out
    assert "the same plan twice differs by 1.30 x, at most 1.50 x" in said
    assert "predictions within 20 %: 1 of 2 cells" in said


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2")
def test_a_cell_is_measured_once(tmp_path):
    path = tmp_path / "choices.json"
    words = "--models resnet20 --rates 1gbit --ranks 2 --steps 2 --warm 2 --json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.choices", *words.split(), str(path)]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = json.loads(path.read_text())
    assert set(found["ms"]) == {"DDP", "all_gather", "split_gather", "auto"}
    assert all(value > 0 for value in found["ms"].values())
    assert all(value >= 1 for value in found["noise"].values())
    assert chosen(found) in {"all_gather", "split_gather", "float32", "all_gather + float32", "float32 + all_gather"}
    assert "1 cells" in first
    before = path.stat().st_mtime_ns
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert path.stat().st_mtime_ns == before
    assert "1 cells" in again
