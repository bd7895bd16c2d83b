"""What Lightning does beside training goes on working, as with stock DDP."""

import numpy as np
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from tests.conformance.training import ALL, outcome, train
from tests.helpers.training import LATER, Net, digits


class Validates(Net):
    """With data to validate, test and predict on."""

    def val_dataloader(self):
        return DataLoader(digits(seed=5, count=96), batch_size=16)

    test_dataloader = predict_dataloader = val_dataloader

    def validation_step(self, batch, batch_idx):
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)


class Fused(Net):
    """An optimizer that does everything in one kernel."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, fused=True)


OPTIONS = {
    "clip_value": lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clip_norm": lambda: {"gradient_clip_val": 0.1},
    "accumulation": lambda: {
        "callbacks": [callbacks.GradientAccumulationScheduler({0: 2, 1: 1})],
        "max_epochs": 3,
    },
    "ema": lambda: {"callbacks": [callbacks.EMAWeightAveraging(decay=0.9)]},
    "weight_averaging": lambda: {"callbacks": [callbacks.WeightAveraging()]},
    "swa": lambda: {"callbacks": [callbacks.StochasticWeightAveraging(0.01, 1, 1)], "max_epochs": 3},
    "device_stats": lambda: {"callbacks": [callbacks.DeviceStatsMonitor(cpu_stats=True)]},
    "overfit": lambda: {"overfit_batches": 3, "limit_train_batches": None},
    "validation": lambda: {"val_check_interval": 2},
    "fused": dict,
    "bf16": lambda: {"precision": "bf16-mixed"},
}
MODELS = {"validation": Validates, "fused": Fused}


def _all_three(name, folder):
    answers = {}
    for what, compressor in (("stock", None), ("all", ALL), ("some", "onebit")):
        options = OPTIONS[name]()
        if name == "device_stats":
            options |= {"logger": CSVLogger(folder, what), "log_every_n_steps": 1}
        trainer, model = train(compressor, MODELS.get(name, Net), **options)
        answers[what] = outcome(trainer, model)
        if name == "validation":
            trainer.test(model, verbose=False)
            predicted = trainer.predict(model)
            answers[what]["predicted"] = torch.cat(predicted).numpy()
            answers[what]["loss"] = float(trainer.callback_metrics.get("loss", -1))
    return answers


LATER_ONES = {"ema": LATER, "weight_averaging": LATER}
IDLE = {"swa": 1}
"""Steps without a backward: the one that renews batch norm's statistics."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=LATER_ONES.get(name, ())) for name in OPTIONS])
def test_as_with_stock_ddp(pools, tmp_path, name):
    if name == "device_stats":
        pytest.importorskip("psutil")
    first, second = pools[2].run(_all_three, name, str(tmp_path))
    assert np.abs(first["stock"]["parameters"] - first["all"]["parameters"]).max() < 1e-5
    for what in ("all", "some"):
        assert np.array_equal(first[what]["parameters"], second[what]["parameters"]), what
        assert first[what]["finite"]
        assert first[what]["committed"] == first["stock"]["global_step"] - IDLE.get(name, 0)
    assert first["some"]["kept"] > 0
    assert first["some"]["total_bytes_dense"] > 5 * first["some"]["total_bytes_sent"] > 0
    if name == "validation":
        assert np.array_equal(first["stock"]["predicted"], first["all"]["predicted"])
