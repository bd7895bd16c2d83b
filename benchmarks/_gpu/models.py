"""Models whose training steps are measured on a GPU, with synthetic data: each takes a batch and returns the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.resnet.model import AlexNet


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last one four times as wide, around a shortcut; the 3x3 one has the stride."""

    def __init__(self, inward: int, width: int, stride: int) -> None:
        super().__init__()
        outward = 4 * width
        self.body = nn.Sequential(
            *_convolution(inward, width, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outward, 1, 1),
        )
        same = stride == 1 and inward == outward
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inward, outward, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, 4 width, H / stride, W / stride]."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class Classifier(nn.Module):
    """A network for images, with its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of images [N, 3, H, W] with labels [N]."""
        return F.cross_entropy(self.body(images), labels)


def resnet50(width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> Classifier:
    """He, Zhang, Ren, Sun 2015, arXiv:1512.03385, with the stride in the 3x3 convolutions: 25.6 million parameters.

    Args:
        width: channels of the first stage.
        blocks: of each stage.
        classes: at least 2.
    """
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inward = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(inward, width << stage, 2 if stage and not number else 1))
            inward = 4 * width << stage
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inward, classes)))


class LSTM(nn.Module):
    """A word-level language model as Zaremba, Sutskever, Vinyals 2014, arXiv:1409.2329: 66 million parameters.

    Args:
        vocabulary: words.
        hidden: cells of each of the two layers, and length of a word's vector.
    """

    def __init__(self, vocabulary: int = 10_000, hidden: int = 1500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.cells = nn.LSTM(hidden, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        """Mean cross entropy of the words [N, T] that follow words [N, T]."""
        states, _ = self.cells(self.embedding(words))
        return F.cross_entropy(self.head(states).flatten(0, 1), following.flatten())


class Transformer(nn.Module):
    """A decoder of the shape of GPT-2's smallest (Radford et al. 2019), its head apart: 163 million parameters.

    Args:
        vocabulary: tokens.
        width: length of a token's vector, a multiple of 64.
        layers: of attention.
        length: tokens of a sequence, at the most.
    """

    mask: Tensor

    def __init__(self, vocabulary: int = 50_257, width: int = 768, layers: int = 12, length: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Mean cross entropy of the tokens [N, T] that follow tokens [N, T]."""
        states = self.body(self.embedding(tokens) + self.places, self.mask, is_causal=True)
        return F.cross_entropy(self.head(states).flatten(0, 1), following.flatten())


@dataclass(frozen=True)
class Training:
    """A model, and what a batch of it looks like.

    Args:
        make: the model.
        shape: of its input: images float32 [N, 3, H, W], or tokens int64 [N, T].
        classes: labels, or tokens, are below it.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and labels, at random."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(
            self.classes, self.shape if len(self.shape) == 2 else self.shape[:1], generator=generator
        )
        inputs = torch.randn(self.shape, generator=generator) if len(self.shape) == 4 else labels.roll(1, -1)
        return inputs.to(device), labels.to(device)


MODELS = {
    "resnet50": Training(resnet50, (64, 3, 224, 224), 1000),
    "transformer": Training(Transformer, (6, 512), 50_257),
    "lstm": Training(LSTM, (64, 35), 10_000),
    "alexnet": Training(lambda: Classifier(AlexNet()), (128, 3, 224, 224), 1000),
}
"""As they are trained."""
SMALL = {
    "resnet50": Training(lambda: resnet50(8, (1, 1, 1, 1), 10), (4, 3, 32, 32), 10),
    "transformer": Training(lambda: Transformer(100, 64, 1, 16), (2, 16), 100),
    "lstm": Training(lambda: LSTM(100, 32), (2, 5), 100),
    "alexnet": Training(lambda: Classifier(AlexNet(10, image_size=32, hidden=16)), (2, 3, 32, 32), 10),
}
"""The same, for tests."""


def _convolution(inward: int, outward: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    """A convolution that keeps the size but for the stride, and the norm after it."""
    return nn.Conv2d(inward, outward, size, stride, size // 2, bias=False), nn.BatchNorm2d(outward)
