"""A job under torchrun goes on after a worker was killed, at the same and at a smaller world size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks._faults import ranks
from benchmarks._faults.training import Job
from benchmarks._faults.trial import PATIENCE, Trials

ROOT = Path(__file__).parents[2]


def torchrun(folder, workers, *options):
    """Run the elastic job; what every rank wrote at its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", *options]
    run = subprocess.run(
        [*command, "-m", "benchmarks._faults.elastic", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((folder / f"elastic{rank}.json").read_text()) for rank in range(workers)]


def test_a_killed_worker_comes_back(tmp_path):
    expected = Trials().undisturbed("topk", 2).outcomes
    ended = torchrun(tmp_path, 2, "--max-restarts=1")
    for ours, theirs in zip(ended, expected, strict=True):
        assert ours["started at"] == 4
        for what in ("step", "parameters", "state"):
            assert ours[what] == theirs[what]


def test_fewer_workers_go_on_from_the_mean(tmp_path):
    job = Job(str(tmp_path), "topk", 3, fault="killed in forward", victim=2, at=5)
    assert ranks.run(job, PATIENCE).exits == [1, 1, -9]
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["lightning_compress"]["save"]
    parts = [torch.load(path, weights_only=True) for path in tmp_path.glob(f"checkpoints/last.ckpt.lc/{saved}.*")]
    assert len(parts) == 3
    mean = {}
    for part in parts:
        for group in part["state"]["groups"]:
            one = group["states"]["residual"]
            for name, numbers in zip(one["names"], one["numbers"].split(one["numels"]), strict=True):
                mean[name] = mean.get(name, 0) + numbers / 3
    (tmp_path / "died").touch()
    first, second = torchrun(tmp_path, 2)
    assert first["started at"] == 4
    assert first["started with"] == second["started with"]
    assert first["started with"] == pytest.approx({name: float(each.norm()) for name, each in mean.items()}, rel=1e-5)
    assert first["step"] == 8
    assert first["parameters"] == second["parameters"]
