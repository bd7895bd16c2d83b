"""Small tasks that benchmarks train on: a new model, a rank's batches, and the losses on held-out data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks._digits import mnist
from benchmarks._target.characters import Characters
from benchmarks.harness.models import MODELS, perceptron

BATCH = 16
INPUTS, HIDDEN, OUTPUTS = 64, 128, 16


class MLP(nn.Module):
    """Two hidden layers: 26,624 weights, all matrices large enough to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron(INPUTS, HIDDEN, HIDDEN, OUTPUTS)

    def forward(self, examples: Tensor) -> Tensor:
        """Mean squared error over the targets' variance; float32 ``[batch, INPUTS + OUTPUTS]``."""
        targets = examples[:, INPUTS:]
        loss: Tensor = (self.layers(examples[:, :INPUTS]) - targets).square().mean()
        return loss / targets.var()


class Learning:
    """A function, the same for everybody, by examples; see ``Characters``."""

    def __init__(self, root: Path | None = None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            self._network = MLP().layers
        self._held_out = self._draw(4096, torch.Generator().manual_seed(99))

    @torch.no_grad()
    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Float32 ``[count, INPUTS + OUTPUTS]``."""
        inputs = torch.randn(count, INPUTS, generator=generator)
        return torch.cat([inputs, self._network(inputs)], 1)

    def model(self) -> nn.Module:
        """A new one."""
        return MLP()

    def batches(self, seed: int, rank: int) -> Iterator[Tensor]:
        """A rank's, without end."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            yield self._draw(BATCH, generator)

    @torch.no_grad()
    def losses(self, model: nn.Module, rank: int, ranks: int) -> Tensor:
        """Sum of losses and count, ``[1, 2]``: squared errors over the variance of what is to be learnt."""
        own = self._held_out[rank::ranks]
        return torch.tensor([[float(model(own)) * len(own), len(own)]], dtype=torch.float64)


class Classifier(nn.Module):
    """An MLP of two hidden layers on images of MNIST: 644,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MODELS["mnist"][0]()

    def forward(self, examples: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy, of images and labels."""
        images, labels = examples
        return nn.functional.cross_entropy(self.layers(images), labels)


class Digits:
    """4,000 images of MNIST to learn from, and 1,000 held out, of which the errors count; see ``Characters``."""

    def __init__(self, root: Path | None = None) -> None:
        self._images, self._labels = mnist()

    def model(self) -> nn.Module:
        """A new one."""
        return Classifier()

    def batches(self, seed: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A rank's, without end."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            rows = torch.randint(4000, (BATCH,), generator=generator)
            yield self._images[rows], self._labels[rows]

    @torch.no_grad()
    def losses(self, model: nn.Module, rank: int, ranks: int) -> Tensor:
        """Number of images that it gets wrong, and of all, ``[1, 2]``."""
        images, labels = self._images[4000 + rank :: ranks], self._labels[4000 + rank :: ranks]
        wrong = (model.get_submodule("layers")(images).argmax(1) != labels).sum()
        return torch.tensor([[float(wrong), len(labels)]], dtype=torch.float64)


Task = Characters | Learning | Digits
TASKS: dict[str, type[Task]] = {"lstm": Characters, "mlp": Learning, "mnist": Digits}
