"""The model and the data that the examples train: a small classifier, and data that need no download."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

INPUTS, CLASSES = 64, 10


class Net(LightningModule):
    """Classify vectors of 64 numbers.

    Args:
        width: size of the hidden layers.
        lr: learning rate of SGD with momentum.
    """

    def __init__(self, width: int = 512, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        hidden = (nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.layers = nn.Sequential(*hidden, nn.Linear(width, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[batch, 10]`` of ``[batch, 64]``."""
        return self.layers(inputs)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self(inputs), labels)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        """Log the mean loss and accuracy over all ranks."""
        inputs, labels = batch
        logits = self(inputs)
        self.log("val/loss", nn.functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("val/accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def on_fit_end(self) -> None:
        """Print how well the model does."""
        if self.trainer.is_global_zero:
            found = self.trainer.callback_metrics
            print(f"validation: loss {found['val/loss']:.6f}, accuracy {100 * found['val/accuracy']:.1f} %")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)


class Data(LightningDataModule):
    """Noisy points around the centre of each class.

    Args:
        batch_size: of each process.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        generator = torch.Generator().manual_seed(7)
        centres = torch.randn(CLASSES, INPUTS, generator=generator)
        labels = torch.randint(CLASSES, (5120,), generator=generator)
        inputs = centres[labels] + 2 * torch.randn(5120, INPUTS, generator=generator)
        self.training = TensorDataset(inputs[:4096], labels[:4096])
        self.validation = TensorDataset(inputs[4096:], labels[4096:])

    def train_dataloader(self) -> DataLoader:
        """Return shuffled batches; Lightning gives each rank its part."""
        return DataLoader(self.training, self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the batches that no rank trains on."""
        return DataLoader(self.validation, 128)
