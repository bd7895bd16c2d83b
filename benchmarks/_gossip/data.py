"""What ranks without a leader train: ResNet-20 on images of CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_compress.core.random import mix
from recipes.resnet.cifar10 import FOLDER, MEAN, STD, TEST_FILES, TRAIN_FILES, read_batches
from recipes.resnet.data import Split, crop_and_flip
from recipes.resnet.model import ResNet


class Pictures:
    """Each rank's own images, and those of the test set.

    Args:
        root: holds the folder of CIFAR-10's binary files.
        images: of the training set.
        tested: of the test set.
        size: of a batch of all ranks.
    """

    def __init__(self, root: Path, images: int = 10_000, tested: int = 10_000, size: int = 128) -> None:
        self._train = read_batches(root / FOLDER, TRAIN_FILES[: -(-images // 10_000)]).rows(0, images)
        self._test = read_batches(root / FOLDER, TEST_FILES).rows(0, tested)
        self._size = size

    def network(self, seed: int) -> nn.Module:
        """Return the same weights on all ranks, which are threads and share torch's generator."""
        model, generator = ResNet(20), torch.Generator().manual_seed(seed)
        for each in model.modules():
            if isinstance(each, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(each.weight, nonlinearity="relu", generator=generator)
        return model

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return a rank's images, cropped, flipped and normalised, and their labels."""
        own, size = Split(self._train.images[rank::ranks], self._train.labels[rank::ranks]), self._size // ranks
        generator = torch.Generator().manual_seed(mix(seed, step, rank + 1) % 2**63)
        rows = torch.randint(len(own.labels), (size,), generator=generator)
        bits = torch.randint(2**31, (size,), generator=generator)
        return _normalised(crop_and_flip(own.images[rows], bits)), own.labels[rows]

    def test(self, model: nn.Module) -> tuple[float, float]:
        """Return the mean loss, and percent that are right."""
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
