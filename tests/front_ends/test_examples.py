"""The examples for Fabric, Accelerate and Ray run, and end the same after an interruption."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.config.composing import ROOT
from tests.helpers import forked

EXAMPLES = ROOT / "examples"
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


def absent(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def by_forks(folder, *words):
    """The example's two ranks, in forks."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return "\n".join(forked.ranks(words, cwd=folder, env=variables))


def run(folder, *words, timeout=200):
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    words = [sys.executable, *map(str, words)]
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("run", "command"),
    [
        pytest.param(by_forks, [EXAMPLES / "fabric.py"], id="fabric"),
        # Fabric starts the second rank: the only difference
        pytest.param(run, [EXAMPLES / "fabric.py"], id="fabric itself", marks=pytest.mark.thorough),
        pytest.param(run, [*LAUNCH, EXAMPLES / "accelerate_train.py"], id="accelerate", marks=absent("accelerate")),
    ],
)
def test_a_loop_resumes(tmp_path, run, command):
    common = [*command, "--compressor", "topk"]
    whole = run(tmp_path, *common, "--checkpoint", "whole", "--epochs", 2)
    run(tmp_path, *common, "--checkpoint", "half", "--epochs", 1)
    again = run(tmp_path, *common, "--checkpoint", "half", "--epochs", 2, "--resume")
    losses = [re.findall(r"validation: loss ([\d.]+)", each) for each in (whole, again)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1
    sent = [int(re.search(r"sent: ([\d,]+) bytes", each)[1].replace(",", "")) for each in (whole, again)]
    assert sent[0] > sent[1] > 0


@absent("ray")
@pytest.mark.thorough
def test_ray(tmp_path):
    said = run(tmp_path, EXAMPLES / "ray_train.py", "--epochs", 2, timeout=290)
    assert "last checkpoint:" in said
