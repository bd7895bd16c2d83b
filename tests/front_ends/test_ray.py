"""Ray Train: its local mode, and a local cluster in which a worker dies. Needs ``pip install 'ray[train]'``."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_compress import CompressedDDPStrategy
from tests.helpers.training import fit, parameters

HERE = Path(__file__).parent
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def run(*words, timeout):
    variables = {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_AUTH_MODE": "disabled"}
    variables |= {"RAY_enable_worker_prestart": "0", "RAY_worker_register_timeout_seconds": "120"}
    words = [sys.executable, *map(str, words)]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def ended(folder):
    return [json.loads((folder / f"ended{rank}.json").read_text()) for rank in range(2)]


def local(folder, settings, *checkpoint):
    folder.mkdir()
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    run(*launch, HERE / "ray_local.py", folder, json.dumps(settings), *checkpoint, timeout=200)
    return ended(folder)


def merged(folders, to, without=()):
    """What Ray stores: the files of all ranks' folders in one."""
    for folder in folders:
        shutil.copytree(folder, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*without))
    return str(to / "checkpoint.ckpt")


def _by_trainer(settings, epochs):
    strategy = CompressedDDPStrategy(**settings)
    _, model = fit(strategy, -1, max_epochs=epochs, limit_train_batches=3)
    stats = strategy.comm_stats()
    weights = hashlib.sha256(parameters(model).numpy().tobytes()).hexdigest()
    return weights, stats["total_bytes_sent"], stats["residual_norm"]


@needs_ray
def test_local_mode(pools, tmp_path):
    """Bytes and weights of a plain Trainer; each rank's file is in its own folder; an exact resume from all of them."""
    settings = {"compressor": "topk", "bucket_cap_mb": 0.02}
    whole = local(tmp_path / "whole", settings)
    for each, (weights, sent, _) in zip(whole, pools[2].run(_by_trainer, settings, 2), strict=True):
        assert each["weights"] == weights
        assert each["bytes"] == sent
        assert "Invalid strategy class" in each["refused"]
    folders = [tmp_path / "whole" / f"rank{rank}" / "0" for rank in range(2)]
    for rank, folder in enumerate(folders):
        (file,) = (folder / "checkpoint.ckpt.lc").iterdir()
        assert file.name.endswith(f".rank{rank}.pt")
    again = local(tmp_path / "again", settings, merged(folders, tmp_path / "merged"))
    for name in ("weights", "residual"):
        assert [each[name] for each in again] == [each[name] for each in whole]
    assert not any(each["lost"] for each in again)
    without = merged(folders, tmp_path / "without", without=["*.rank1.pt"])
    lost = local(tmp_path / "lost", settings, without)
    assert "rank1.pt is missing" in lost[0]["lost"][0]
    assert lost[0]["weights"] != whole[0]["weights"]


@needs_ray
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_worker_that_dies(pools, tmp_path):
    """Ray starts all workers again; they end as those of a Trainer that nobody interrupted."""
    run(HERE / "ray_cluster.py", tmp_path, timeout=800)
    assert (tmp_path / "died").exists()
    stored = Path((tmp_path / "checkpoint").read_text())
    ranks = {file.name.rpartition(".rank")[2] for file in (stored / "checkpoint.ckpt.lc").iterdir()}
    assert ranks == {"0.pt", "1.pt"}
    settings = {"compressor": "topk", "bucket_cap_mb": 0.02}
    found, wanted = ended(tmp_path), pools[2].run(_by_trainer, settings, 3)
    for each, (weights, _, residual) in zip(found, wanted, strict=True):
        assert each["resumed"]
        assert (each["weights"], each["residual"]) == (weights, residual)
    assert found[0]["residual"] != found[1]["residual"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_the_message_says_what_to_install():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-compress\[ray\]'"):
        importlib.import_module("lightning_compress.ray")
