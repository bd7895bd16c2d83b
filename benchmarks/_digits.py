"""The handwritten digits that several benchmarks train on."""

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
