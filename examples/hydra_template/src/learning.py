"""A model and data that need no download: a student learns what a random teacher says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Student(LightningModule):
    """A small classifier.

    Args:
        width: of the hidden layer.
        optimizer: makes an optimizer of the parameters.
    """

    def __init__(self, width: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self._make_optimizer = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self._make_optimizer(self.parameters())


class Teacher(LightningDataModule):
    """Random inputs, and the labels that a random linear teacher gives them.

    Args:
        batch_size: per rank.
        examples: of all ranks together.
    """

    def __init__(self, batch_size: int, examples: int) -> None:
        super().__init__()
        self._batch_size, self._examples = batch_size, examples

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return all examples; the Trainer gives each rank its part."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self._examples, 64, generator=generator)
        labels = (inputs @ torch.randn(64, 10, generator=generator)).argmax(1)
        return DataLoader(TensorDataset(inputs, labels), self._batch_size, shuffle=True)
