"""The command line, in real processes."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.types import RunMode
from lightning.pytorch.loggers import CSVLogger

from recipes.build import build
from recipes.train import go_on_writing, refuse_idle, refuse_multirun
from tests.config.composing import ROOT, composed


def train(*overrides: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m recipes.train`` as a user does; a hang is a failure."""
    launched = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    environment = {key: value for key, value in os.environ.items() if key not in launched}
    return subprocess.run(
        [sys.executable, "-m", "recipes.train", *overrides, f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_two_processes_with_a_compressor(tmp_path: Path) -> None:
    overrides = ["debug=fast", "logger=csv", "trainer=cpu_2proc", "compressor=topk", "compressor.density=0.05"]
    done = train(*overrides, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1  # rank 0 speaks for all
    assert "x fewer bytes than float32" in done.stdout
    hparams = next(tmp_path.rglob("hparams.yaml")).read_text()
    assert "density: 0.05" in hparams
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0].split(",")
    assert {"comm/ratio", "comm/bytes_sent", "train/loss", "test/acc"} <= set(header)


@pytest.mark.thorough
def test_one_process(tmp_path: Path) -> None:
    done = train("debug=fast", "trainer=cpu", "compressor=onebit", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1


def test_missing_data_stops_every_rank(tmp_path: Path) -> None:
    done = train("debug=fast", "trainer=cpu_2proc", "data=cifar10", f"data.root={tmp_path}", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("ValueError: data.root=") == 2
    assert "data.download=true" in done.stderr


@pytest.mark.thorough
def test_multirun_of_several_processes_is_refused(tmp_path: Path) -> None:
    done = train("--multirun", "debug=fast", "trainer=cpu_2proc", "compressor=none,bf16", folder=tmp_path)
    assert done.returncode != 0
    assert "ValueError: --multirun with trainer.devices=2" in done.stderr


@pytest.mark.parametrize(
    ("mode", "overrides", "refused"),
    [
        (RunMode.RUN, ["trainer.devices=2"], False),
        (RunMode.MULTIRUN, ["trainer.devices=1"], False),
        (RunMode.MULTIRUN, ["trainer.devices=2", "strategy.start_method=spawn"], False),
        (RunMode.MULTIRUN, ["trainer.devices=-1"], True),
        (RunMode.MULTIRUN, ["trainer.devices=1", "trainer.num_nodes=2"], True),
    ],
)
def test_what_multirun_refuses(mode: RunMode, overrides: list[str], refused: bool) -> None:
    cfg = composed(*overrides)
    if not refused:
        refuse_multirun(cfg, mode)
        return
    with pytest.raises(ValueError, match=r"torchrun|W&B agents"):
        refuse_multirun(cfg, mode)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["compressor=topk", "trainer.strategy=ddp"], "compressor=lightning_compress.codecs.TopK has no effect"),
        (["exchange=two_shot", "trainer.strategy=auto"], "exchange=lightning_compress.exchanges.TwoShot has no effect"),
        (["compressor=fft", "recovery=theta"], "recovery has no effect: it is none of trainer.callbacks"),
    ],
)
def test_what_has_no_effect_is_refused(overrides: list[str], words: str) -> None:
    cfg = composed("trainer=cpu", *overrides)
    with pytest.raises(ValueError, match=re.escape(words)):
        refuse_idle(cfg, build(cfg.trainer))


@pytest.mark.parametrize(
    "overrides",
    [[], ["trainer.strategy=ddp"], ["compressor=topk", "exchange=two_shot"], ["experiment=resnet_recovery"]],
)
def test_what_has_an_effect_is_not(overrides: list[str]) -> None:
    cfg = composed("trainer=cpu", *overrides)
    refuse_idle(cfg, build(cfg.trainer))


def _in_a_process_of_its_own(logger: CSVLogger, metrics: dict[str, float], step: int) -> None:
    """What a spawned process does with the logger that it is sent."""
    sent = pickle.loads(pickle.dumps(logger))
    sent.log_metrics(metrics, step)
    sent.save()


def test_csv_files_keep_what_spawned_processes_wrote(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"seed": 0})
    _in_a_process_of_its_own(logger, {"train/loss": 2.0, "epoch": 0}, 3)
    go_on_writing([logger])
    _in_a_process_of_its_own(logger, {"test/acc": 0.5, "epoch": 0}, 4)
    header, *rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    assert header == "epoch,step,test/acc,train/loss"
    assert rows == ["0,3,,2.0", "0,4,0.5,"]


@pytest.mark.thorough
def test_multirun_of_spawned_processes_writes_its_csv(tmp_path: Path) -> None:
    overrides = ["debug=fast", "logger=csv", "trainer=cpu_2proc", "strategy.start_method=spawn", "compressor=topk"]
    done = train("--multirun", *overrides, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    header, *rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert {"comm/ratio", "train/loss", "test/acc"} <= set(header.split(","))
    assert len(rows) > 3
