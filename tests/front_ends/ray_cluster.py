"""Two workers of a local Ray cluster, one of which dies once: ``ray_cluster.py FOLDER``."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    """Three epochs of three steps; rank 1 dies in the second one, once."""
    import warnings

    import lightning.pytorch as pl
    import torch
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from lightning_compress.ray import RayCompressedDDPStrategy
    from tests.helpers import link
    from tests.helpers.training import Net, digits, loader, parameters

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    link.pretend()
    flag = Path(config["folder"], "died")

    class Dying(Net):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 4 and self.trainer.global_rank == 1 and not flag.exists():
                flag.touch()
                time.sleep(10)  # Ray asks its workers for their reports once a second
                os._exit(1)
            return super().training_step(batch, batch_idx)

    torch.manual_seed(1)
    model = Dying()
    strategy = RayCompressedDDPStrategy("topk", bucket_cap_mb=0.02)
    plugins, callbacks = [RayLightningEnvironment()], [RayTrainReportCallback()]
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"accelerator": "cpu", "devices": "auto", "max_epochs": 3, "limit_train_batches": 3}
    trainer = prepare_trainer(pl.Trainer(strategy=strategy, plugins=plugins, callbacks=callbacks, **options))
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            trainer.fit(model, loader(digits()), ckpt_path=f"{folder}/checkpoint.ckpt")
    else:
        trainer.fit(model, loader(digits()))
    ended = {
        "weights": hashlib.sha256(parameters(model).numpy().tobytes()).hexdigest(),
        "residual": strategy.comm_stats()["residual_norm"],
        "resumed": checkpoint is not None,
    }
    Path(config["folder"], f"ended{trainer.global_rank}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    home = sys.argv[1]
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80_000_000)
    result = TorchTrainer(
        train,
        train_loop_config={"folder": home},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(name="run", storage_path=f"{home}/storage", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    Path(home, "checkpoint").write_text(result.checkpoint.path)
    ray.shutdown()
