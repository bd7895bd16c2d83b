"""Models whose steps are measured, with inputs of their own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from recipes.resnet.model import AlexNet, ResNet


class Outputs(nn.Module):
    """A recurrent layer of which only the outputs are wanted.

    Args:
        layer: such as ``nn.LSTM``.
    """

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """[steps, batch, width] -> [steps, batch, hidden], or both with the batch first."""
        outputs: Tensor = self.layer(x)[0]
        return outputs


def recurrent() -> nn.Module:
    """Two LSTM layers of 1024 cells over 20 steps, 16.8 million parameters."""
    return Outputs(nn.LSTM(1024, 1024, 2, batch_first=True))


def transformer() -> nn.Module:
    """Five layers of 512 units and 8 heads, 15.8 million parameters."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers between vectors of these widths, with ReLU between two of them."""
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def mlp() -> nn.Module:
    """Four linear layers, 12.5 million parameters."""
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1768, 1768), nn.ReLU())])


def classifier() -> nn.Module:
    """Three layers of 4096 units and ten classes, 50 million parameters."""
    return perceptron(4096, 4096, 4096, 4096, 10)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (16, 1768)),
    "mnist": (lambda: perceptron(784, 500, 500, 10), (16, 784)),
    "classifier": (classifier, (8, 4096)),
    "resnet20": (lambda: ResNet(20), (32, 3, 32, 32)),
    "lstm": (recurrent, (4, 20, 1024)),
    "transformer": (transformer, (2, 32, 512)),
    "alexnet": (lambda: AlexNet(dropout=0.0), (2, 3, 224, 224)),
    "alexnet_head": (lambda: AlexNet(dropout=0.0).classifier, (8, 9216)),
}
"""Each with the shape of a rank's batch."""


def batch(name: str, rank: int) -> Tensor:
    """A rank's own input."""
    return torch.randn(MODELS[name][1], generator=torch.Generator().manual_seed(rank))
