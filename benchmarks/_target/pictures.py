"""Task C: a multilayer perceptron on CIFAR-10."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks._target.averaging import MakeOptimizer
from recipes.resnet.cifar10 import FOLDER, TEST_FILES, TRAIN_FILES, read_batches

BATCH, HIDDEN, CLASSES = 16, 512, 10
PIXELS = 3 * 32 * 32
HELD_OUT = 4000
"""Pictures of the test set that are evaluated: all of them would take a large share of a run."""


class Perceptron(nn.Module):
    """Two hidden layers of 512 units: 1.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        first, second = (nn.Linear(size, HIDDEN) for size in (PIXELS, HIDDEN))
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, records: Tensor) -> Tensor:
        """Mean cross entropy, in nats.

        Args:
            records: labels and pixels, float32 [pictures, 1 + 3072]; pixels are 0 to 255.
        """
        labels, pixels = records[:, 0].long(), (records[:, 1:] - 127.5) / 64
        return cross_entropy(self.layers(pixels), labels)


class Pictures:
    """Pictures of ten classes: a new model, a rank's batches, and the losses on two halves of the test set.

    Args:
        root: folder that holds cifar-10-batches-bin.
    """

    def __init__(self, root: Path) -> None:
        self._train, tested = (_records(root / FOLDER, names) for names in (TRAIN_FILES, TEST_FILES))
        self._held_out = tested[:HELD_OUT]

    def model(self) -> nn.Module:
        """Return a new model, which depends on torch's seed."""
        return Perceptron()

    def batches(self, seed: int, rank: int) -> Iterator[Tensor]:
        """Yield a rank's batches without end; equal for all methods."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            yield self._train[torch.randint(len(self._train), (BATCH,), generator=generator)].float()

    @torch.no_grad()
    def losses(self, model: nn.Module, rank: int, ranks: int) -> Tensor:
        """Return sums of losses and counts, float64 [2, 2], of this rank's share of both halves.

        Pictures take turns between the half that chooses a learning rate and the one that is reported.
        """
        shares = [self._held_out[half::2][rank::ranks].float() for half in range(2)]
        return torch.tensor([[float(model(share)) * len(share), len(share)] for share in shares], dtype=torch.float64)

    def optimizer(self, rate: float) -> MakeOptimizer:
        """Return what makes SGD with a momentum of 0.9."""

        def make(parameters: Any, kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = kind(parameters, lr=rate, momentum=0.9)
            return optimizer

        return make


def _records(folder: Path, names: tuple[str, ...]) -> Tensor:
    """Labels and pixels, uint8 [pictures, 1 + 3072]."""
    split = read_batches(folder, names)
    return torch.cat([split.labels.to(torch.uint8)[:, None], split.images.flatten(1)], 1)
