"""Train with a Trainer: ``python plain.py``. SLURM starts it too: ``slurm.sh``."""

import argparse

from lightning.pytorch import Trainer, seed_everything
from task import Data, Net

from lightning_compress import CommunicationMonitor, CompressedDDPStrategy

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compressor", default="qsgd", help="a name that `lightning-compress compressors` prints")
    parser.add_argument("--devices", type=int, default=2, help="processes on each machine")
    parser.add_argument("--num-nodes", type=int, default=1, help="machines")
    arguments = parser.parse_args()

    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",  # leave it out to train on GPUs
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        strategy=CompressedDDPStrategy(arguments.compressor),
        callbacks=[CommunicationMonitor()],
        max_epochs=3,
    )
    trainer.fit(Net(), datamodule=Data())
