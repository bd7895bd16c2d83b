"""Train with Ray Train: ``pip install 'lightning-compress[ray]'``, then ``python ray_train.py``.

Ray starts a failed run again by itself; it goes on from the last checkpoint, bit for bit.
"""

import argparse
import os

from lightning.pytorch import Trainer, seed_everything
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_checkpoint
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from task import Data, Net

from lightning_compress import CommunicationMonitor
from lightning_compress.ray import RayCompressedDDPStrategy


def train(config: dict) -> None:
    """Train on one worker; Ray calls it on each of them, again after a failure."""
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",  # leave it out to train on GPUs
        devices="auto",
        strategy=RayCompressedDDPStrategy(config["compressor"]),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), CommunicationMonitor()],
        max_epochs=config["epochs"],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    if checkpoint := get_checkpoint():
        with checkpoint.as_directory() as folder:
            path = os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.fit(Net(), datamodule=Data(), ckpt_path=path)
    else:
        trainer.fit(Net(), datamodule=Data())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compressor", default="qsgd", help="a name that `lightning-compress compressors` prints")
    parser.add_argument("--workers", type=int, default=2, help="processes, on all machines together")
    parser.add_argument("--epochs", type=int, default=3, help="epochs")
    parser.add_argument("--storage", default=os.path.abspath("ray_results"), help="folder that all machines can reach")
    arguments = parser.parse_args()

    run = RunConfig(
        name="compressed",
        storage_path=arguments.storage,
        failure_config=FailureConfig(max_failures=2),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    config = {"compressor": arguments.compressor, "epochs": arguments.epochs}
    scaling = ScalingConfig(num_workers=arguments.workers, use_gpu=False)
    result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    print(f"last checkpoint: {result.checkpoint.path}")
