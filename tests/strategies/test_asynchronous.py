"""Asynchronous gossip by Lightning: who waits, what is evaluated and saved, and what is refused."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from lightning_compress import AsyncGossipStrategy
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer

METHODS = {"exact": None, "8 bits": "moniqua", "4 bits": {"name": "moniqua", "bits": 4}}


class Validated(Net):
    """With a validation over all ranks."""

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(images), labels), sync_dist=True)


class Watch(Callback):
    """What each rank trained and what was evaluated."""

    def __init__(self):
        self.steps, self.evaluated, self.losses = [], [], []

    def on_train_epoch_start(self, trainer, module):
        self.steps.append(0)

    def on_train_batch_end(self, trainer, module, *_):
        self.steps[-1] += 1

    def on_validation_batch_start(self, trainer, module, *_):
        self.evaluated.append(parameters(module).numpy())

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def fit(strategy, make=Validated, callbacks=(), resume=None, epochs=2, **options):
    """Two epochs over all digits."""
    torch.manual_seed(1)
    model = make("adamw")
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    trainer = quiet_trainer(
        strategy, enable_checkpointing=saves, callbacks=list(callbacks), max_epochs=epochs, **options
    )
    trainer.fit(model, loader(digits()), loader(digits(5, 96)), ckpt_path=resume)
    return trainer, model


def _trains(compressor, share):
    watch = Watch()
    trainer, model = fit(AsyncGossipStrategy(compressor=compressor, share_work=share), callbacks=[watch])
    stats = trainer.strategy.comm_stats()
    return watch.steps, watch.evaluated, watch.losses, parameters(model).numpy(), stats


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("compressor", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("size", [2, 3])
def test_one_model_is_evaluated_and_left(pools, size, compressor, share):
    ranks = pools[size].run(_trains, compressor, share)
    batches = 60 if share else 60 // size * size
    assert [sum(steps) for steps in zip(*(rank[0] for rank in ranks), strict=True)] == [batches] * 2
    for rank in ranks[1:]:
        for mine, theirs in zip(rank[1], ranks[0][1], strict=True):
            assert np.array_equal(mine, theirs)
        assert rank[2] == ranks[0][2]
        assert np.array_equal(rank[3], ranks[0][3])
    assert ranks[0][2][1] < ranks[0][2][0] < 2.3
    for *_, stats in ranks:
        assert stats["answers"] > 0
        assert stats["bytes_sent"] >= 0
        assert 0 < stats["consensus_distance"] < 1
