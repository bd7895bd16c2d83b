"""Train with LightningCLI: ``python cli.py fit --config cli.yaml``.

Each setting of the file is an option too: ``--trainer.strategy.compressor.bits 5``.
"""

from lightning.pytorch.cli import LightningCLI
from task import Data, Net

import lightning_compress  # noqa: F401  registers names such as --trainer.strategy compressed_ddp_onebit

if __name__ == "__main__":
    LightningCLI(Net, Data)
