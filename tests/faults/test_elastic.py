"""A job under torchrun goes on after a worker was killed, at the same and at a smaller world size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness.faults import ranks
from benchmarks.harness.faults.training import Job
from benchmarks.harness.faults.trial import PATIENCE, Trials

ROOT = Path(__file__).parents[2]


def torchrun(folder, workers, *options):
    """Run the elastic job; what every rank wrote at its end.

    A store that torchrun shares with its workers would keep addresses of those that died (pytorch#135712).
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", *options]
    run = subprocess.run(
        [*command, "-m", "benchmarks.harness.faults.elastic", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(workers)]


def processes(folder, workers):
    """The same without torchrun, whose workers take long to start."""
    ended = ranks.run(Job(str(folder), "topk", workers, resume="last"), PATIENCE)
    assert ended.exits == [0] * workers
    return ended.outcomes


@pytest.mark.thorough
def test_a_killed_worker_comes_back(tmp_path):
    expected = Trials().undisturbed("topk", 2).outcomes
    ended = torchrun(tmp_path, 2, "--max-restarts=1")
    for ours, theirs in zip(ended, expected, strict=True):
        assert ours["begun"]["step"] == 4
        for what in ("step", "parameters", "state"):
            assert ours[what] == theirs[what]


@pytest.mark.parametrize("launch", [processes, pytest.param(torchrun, marks=pytest.mark.thorough)])
def test_fewer_workers_go_on_from_the_mean(tmp_path, launch):
    killed = ranks.run(Job(str(tmp_path), "topk", 3, fault="killed in forward", victim=2, at=5), PATIENCE)
    assert killed.exits == [1, 1, -9]
    mean = mean_of_parts(tmp_path / "checkpoints/last.ckpt")
    first, second = launch(tmp_path, 2)
    norms = {name: float(each.norm()) for name, each in mean.items()}
    assert first["begun"] == second["begun"] == pytest.approx({"step": 4} | norms, rel=1e-5)
    assert max(norms.values()) > 0
    assert first["step"] == 12
    assert first["parameters"] == second["parameters"]


def mean_of_parts(path):
    """The residual of each parameter, as a mean over three ranks, from their files."""
    save = torch.load(path, weights_only=True)["lightning_compress"]["save"]
    parts = [torch.load(part, weights_only=True) for part in path.parent.glob(f"{path.name}.lc/{save}.*")]
    assert len(parts) == 3
    mean = {}
    for group in (group for part in parts for group in part["tree"]["groups"]):
        one = group["states"]["residual"]
        for name, numbers in zip(one["names"], one["numbers"].split(one["numels"]), strict=True):
            mean[name] = mean.get(name, 0) + numbers / 3
    return mean
