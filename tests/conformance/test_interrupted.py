"""Runs that are cut short by an exception or a signal go on exactly."""

import contextlib
import json
import os
import signal
import stat
import time
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_compress.strategies.rendezvous import EVERY
from tests.conformance.training import ByStep, outcome, train

AT, STEPS = 5, 11
COMPRESSORS = ["onebit", "powersgd", {"name": "dgc", "density": 0.05}]


class Fails(ByStep):
    """An exception in the middle of an epoch, on all ranks."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == AT:
            raise ArithmeticError("no more")
        return loss


class Kept(OnExceptionCheckpoint):
    """Its file stays when the trainer is done."""

    def teardown(self, *_):
        pass


def until(compressor, make=ByStep, **options):
    return train(compressor, make, max_epochs=-1, max_steps=STEPS, **options)


def whole_run(compressor):
    """What the run that nothing disturbs ends with; once in each rank."""
    return _whole_run(json.dumps(compressor))


@cache
def _whole_run(compressor):
    return outcome(*until(json.loads(compressor)))


def _fails(compressor, folder):
    callback = Kept(folder)
    with contextlib.suppress(ArithmeticError):
        until(compressor, Fails, callbacks=[callback], enable_checkpointing=True)
    again = outcome(*until(compressor, resume=callback.ckpt_path))
    return again, whole_run(compressor), sorted(os.listdir(callback.ckpt_path + ".lc"))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_what_is_saved_on_an_exception_goes_on_exactly(pools, tmp_path, compressor):
    for again, whole, files in pools[2].run(_fails, compressor, str(tmp_path)):
        assert [name.split(".")[1] for name in files] == ["rank0", "rank1"]
        assert again["global_step"] == whole["global_step"] == STEPS
        assert again["committed"] == STEPS
        assert np.array_equal(again["parameters"], whole["parameters"])


class Signalled(Callback):
    """The cluster wants the job to be saved and started again: a signal arrives in the middle of a step.

    Args:
        moment: "between", when some buckets of the step were averaged; "before", none; "after", all.
        first: the rank that it reaches before the others.
    """

    def __init__(self, moment, first):
        self.moment, self.first = moment, first
        self.calls = 0

    def arrive(self):
        if dist.get_rank() != self.first:
            time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGUSR1)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.calls = 0
        if not hasattr(self, "reduce"):
            compression = trainer.strategy.compression
            self.reduce, compression.reduce = compression.reduce, self.watched
        self.now = trainer.global_step == AT

    def watched(self, *bucket):
        if self.now and self.calls == {"before": 0, "between": 1}.get(self.moment, -1):
            self.arrive()
        self.calls += 1
        self.reduce(*bucket)

    def on_after_backward(self, trainer, module):
        if self.now and self.moment == "after":
            self.arrive()


def _slurm(folder):
    """A job of a cluster, and its command to be started again, which only says that it was called."""
    command = f"{folder}/bin{dist.get_rank()}/scontrol"
    os.makedirs(os.path.dirname(command), exist_ok=True)
    with open(command, "w") as file:
        file.write(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
    os.chmod(command, stat.S_IRWXU)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    return {
        "PATH": f"{os.path.dirname(command)}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": size,
        "SLURM_NTASKS_PER_NODE": size,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
    }


def _signal(compressor, moment, first, folder):
    before = os.environ.copy()
    os.environ.update(_slurm(folder))
    try:
        callback = Signalled(moment, first)
        undisturbed = until(compressor, callbacks=[callback], plugins=[SLURMEnvironment()], default_root_dir=folder)
    finally:
        os.environ.clear()
        os.environ.update(before)
    again = outcome(*until(compressor, resume="hpc", default_root_dir=folder))
    return outcome(*undisturbed), again, whole_run(compressor), callback.calls


@pytest.mark.parametrize(
    ("compressor", "moment", "first"),
    [
        ("onebit", "before", 0),
        ("onebit", "between", 0),
        ("onebit", "between", 1),
        ("onebit", "after", 1),
        ("powersgd", "between", 1),
        ({"name": "dgc", "density": 0.05}, "between", 0),
    ],
    ids=str,
)
def test_a_signal_in_the_middle_of_a_step_saves_a_whole_step_soon_after(pools, tmp_path, compressor, moment, first):
    ranks = pools[2].run(_signal, compressor, moment, first, str(tmp_path))
    for undisturbed, again, whole, buckets in ranks:
        assert buckets >= 2
        assert again["committed"] == whole["committed"] == STEPS
        assert np.array_equal(undisturbed["parameters"], whole["parameters"])
        assert np.array_equal(again["parameters"], whole["parameters"])
    assert np.array_equal(ranks[0][1]["parameters"], ranks[1][1]["parameters"])
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert [path.name for path in tmp_path.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"]
    assert AT <= saved <= AT + EVERY + 1
    assert len(list(tmp_path.glob("hpc.lc/*.rank?.pt"))) == 2
