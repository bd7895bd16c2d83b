"""Handwritten digits that come inside scikit-learn."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from .data import ImageData, Split

__all__ = ["Digits"]


class Digits(ImageData):
    """1,797 handwritten digits of 8x8 grey pixels, inside scikit-learn, in a fixed stratified split.

    Args:
        val_size: validation images, 0 or at least 10.
        test_size: test images, at least 10.
        augment: off by default: a mirrored digit is none.
        **kwargs: see :class:`ImageData`.

    Raises:
        ValueError: a value is out of its range.
    """

    in_channels = 1
    image_size = 8
    classes = tuple("0123456789")
    white = 16.0

    def __init__(self, *, val_size: int = 180, test_size: int = 360, augment: bool = False, **kwargs: Any) -> None:
        super().__init__(augment=augment, **kwargs)
        if 0 < val_size < 10 or val_size < 0 or test_size < 10 or val_size + test_size > 1700:
            raise ValueError(
                f"data.val_size={val_size}, data.test_size={test_size} of 1,797 images: val 0 or at least 10 (one of "
                "each class), test at least 10, 1,700 together at most"
            )
        self.sizes = val_size, test_size

    def load(self) -> tuple[Split, Split, Split, Tensor, Tensor]:
        """See ``ImageData.load``."""
        pixels, classes = load_digits(return_X_y=True)
        images, labels = torch.from_numpy(pixels).to(torch.uint8).view(-1, 1, 8, 8), torch.from_numpy(classes)
        val_size, test_size = self.sizes
        # its own constant seed: every run is measured on the same images
        fit, test = train_test_split(range(len(labels)), test_size=test_size, stratify=classes, random_state=0)
        fit, val = (
            train_test_split(fit, test_size=val_size, stratify=classes[fit], random_state=0) if val_size else (fit, [])
        )
        train, val, test = (Split(images[rows], labels[rows]) for rows in (fit, val, test))
        std, mean = torch.std_mean(train.images.float(), (0, 2, 3), correction=0)
        return train, val, test, mean, std
