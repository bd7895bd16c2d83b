"""A script of one's own, which knows nothing of benchmarks: an MLP of 4.1 million parameters on random data."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import CompressedDDPStrategy


class Net(LightningModule):
    """Three linear layers."""

    def __init__(self, width: int = 1900) -> None:
        super().__init__()
        hidden = [nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(width, 10))

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--compressor", default="none")
    given = parser.parse_args()
    seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(8192, 256), torch.randint(10, (8192,)))
    strategy: Any = "ddp" if given.compressor == "none" else CompressedDDPStrategy(given.compressor)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=1, num_nodes=given.nodes, strategy=strategy, max_epochs=10, **quiet)
    trainer.fit(Net(), DataLoader(data, batch_size=64, shuffle=True))
