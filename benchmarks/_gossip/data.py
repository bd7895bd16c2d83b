"""What ranks without a leader train: digits, or ResNet-20 on images of CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._digits import digits
from benchmarks.harness.models import perceptron
from lightning_compress.core.random import mix
from recipes.resnet.cifar10 import FOLDER, MEAN, STD, TEST_FILES, TRAIN_FILES, read_batches
from recipes.resnet.data import Split, crop_and_flip
from recipes.resnet.model import ResNet

TESTED = 500
"""Digits of the test set."""


class Digits:
    """A network of 13,000 parameters on handwritten digits.

    Attributes:
        decay: of the weights.
        cosine: the learning rate falls to 0, as a cosine.
    """

    decay, cosine = 0.0, False

    def __init__(self) -> None:
        images, labels = digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self._images, self._labels = images[order], labels[order]

    def network(self, seed: int) -> nn.Module:
        """Return the same weights on all ranks."""
        torch.manual_seed(seed)
        return perceptron(64, 96, 64, 10)

    def batch(self, seed: int, number: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return images and labels, which follow from the number of the batch, whatever the rank."""
        draw = torch.Generator().manual_seed(seed * 1_000_003 + number)
        rows = torch.randint(TESTED, len(self._labels), (16,), generator=draw)
        return self._images[rows], self._labels[rows]

    def test(self, model: nn.Module) -> tuple[float, float]:
        """Return the mean loss, and percent that are right."""
        with torch.no_grad():
            scores = model(self._images[:TESTED])
        right = (scores.argmax(1) == self._labels[:TESTED]).float().mean()
        return float(F.cross_entropy(scores, self._labels[:TESTED])), 100 * float(right)


class Pictures:
    """ResNet-20 on images of CIFAR-10; see ``Digits``.

    Args:
        root: holds the folder of its binary files.
        images: of the training set.
        tested: of the test set.
        size: of a batch of all ranks.
        shared: ranks draw from all images; else each has its own.
    """

    decay, cosine = 5e-4, True

    def __init__(
        self, root: Path, images: int = 10_000, tested: int = 10_000, size: int = 128, *, shared: bool = False
    ) -> None:
        self._train = read_batches(root / FOLDER, TRAIN_FILES[: -(-images // 10_000)]).rows(0, images)
        self._test = read_batches(root / FOLDER, TEST_FILES).rows(0, tested)
        self._size, self._shared = size, shared

    def network(self, seed: int) -> nn.Module:
        """See ``Digits``; ranks that are threads share the generator that a model is drawn from, so it has its own."""
        model, generator = ResNet(20), torch.Generator().manual_seed(seed)
        for each in model.modules():
            if isinstance(each, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(each.weight, nonlinearity="relu", generator=generator)
        return model

    def batch(self, seed: int, number: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """See ``Digits``; a rank's own images, cropped, flipped and normalised."""
        step, first = (1, 0) if self._shared else (ranks, rank)
        own, size = Split(self._train.images[first::step], self._train.labels[first::step]), self._size // ranks
        key = mix(seed, number, 1) if self._shared else mix(seed, number // ranks, rank + 1)
        generator = torch.Generator().manual_seed(key % 2**63)
        rows = torch.randint(len(own.labels), (size,), generator=generator)
        bits = torch.randint(2**31, (size,), generator=generator)
        return _normalised(crop_and_flip(own.images[rows], bits)), own.labels[rows]

    def test(self, model: nn.Module) -> tuple[float, float]:
        """See ``Digits``."""
        model.eval()
        right, loss = 0, 0.0
        with torch.no_grad():
            for start in range(0, len(self._test.labels), 500):
                part = self._test.rows(start, start + 500)
                scores = model(_normalised(part.images))
                right += int((scores.argmax(1) == part.labels).sum())
                loss += float(F.cross_entropy(scores, part.labels, reduction="sum"))
        return loss / len(self._test.labels), 100 * right / len(self._test.labels)


def _normalised(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return ((images.float() / 255 - mean) / std).to(memory_format=torch.channels_last)  # a sixth faster


Data = Digits | Pictures
