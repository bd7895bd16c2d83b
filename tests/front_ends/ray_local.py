"""A rank in Ray Train's local mode, by torchrun's variables: ``ray_local.py FOLDER SETTINGS [CHECKPOINT]``."""

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_compress import CompressedDDPStrategy
from lightning_compress.ray import RayCompressedDDPStrategy
from tests.helpers import link
from tests.helpers.training import Net, digits, loader, parameters


class SaveToOwnFolder(pl.Callback):
    """As ``RayTrainReportCallback`` saves: each rank to a folder of its own."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(f"{self.folder}/rank{trainer.global_rank}/{trainer.current_epoch}/checkpoint.ckpt")


def train(folder, settings, checkpoint=None, strategy=RayCompressedDDPStrategy):
    """Two epochs of three steps; what this rank ends with."""
    torch.manual_seed(1)
    model = Net()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "max_epochs": 2, "limit_train_batches": 3}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices="auto",
            strategy=strategy(**settings),
            plugins=[RayLightningEnvironment()],
            callbacks=[SaveToOwnFolder(folder)],
            **options,
        )
        prepare_trainer(trainer).fit(model, loader(digits()), ckpt_path=checkpoint)
    stats = trainer.strategy.comm_stats()
    return {
        "weights": hashlib.sha256(parameters(model).numpy().tobytes()).hexdigest(),
        "bytes": stats["total_bytes_sent"],
        "residual": stats["residual_norm"],
        "lost": [text for each in caught if "begins again" in (text := str(each.message))],
    }


def refused():
    """What Ray says of the plain strategy."""
    try:
        train(".", {}, strategy=CompressedDDPStrategy)
    except RuntimeError as error:
        return str(error)
    return ""


def main(folder, settings, checkpoint=None):
    """Write what the rank ends with, and what Ray says of the plain strategy."""
    torch.set_num_threads(1)
    link.pretend()
    ended = {}

    def work():
        ended.update(train(folder, json.loads(settings), checkpoint), refused=refused())

    TorchTrainer(work, scaling_config=ScalingConfig(num_workers=0), run_config=RunConfig(name="local")).fit()
    Path(f"{folder}/ended{os.environ['RANK']}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(*sys.argv[1:])
