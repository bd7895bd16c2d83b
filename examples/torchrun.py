"""Train under torchrun, on one machine or several: ``torchrun --nproc-per-node 2 torchrun.py``.

A job that torchrun starts again (``--max-restarts 3``) goes on from its last checkpoint, bit for bit. On several
machines all ranks need to see the folder ``checkpoints``.
"""

import os

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from task import Data, Net

from lightning_compress import CommunicationMonitor, CompressedDDPStrategy

if __name__ == "__main__":
    devices = int(os.environ["LOCAL_WORLD_SIZE"])  # torchrun's: processes on this machine
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",  # leave it out to train on GPUs
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,  # Lightning raises if the product is another number
        strategy=CompressedDDPStrategy("qsgd"),
        callbacks=[CommunicationMonitor(), ModelCheckpoint("checkpoints", save_last=True)],
        max_epochs=3,
    )
    trainer.fit(Net(), datamodule=Data(), ckpt_path="last")
