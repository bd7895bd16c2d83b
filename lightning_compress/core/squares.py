"""Sums of squares that neither overflow nor need the memory of a float64 copy."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1 << 20
"""Elements that are squared at once."""


def squares(tensor: Tensor, other: Tensor | None = None) -> Tensor:
    """The sum of squares of a tensor, or of what it differs by from another one, in float64, block by block."""
    parts = tensor.reshape(-1).split(_BLOCK)
    others = [0.0] * len(parts) if other is None else other.reshape(-1).split(_BLOCK)
    return torch.stack([(each - less).double().square().sum() for each, less in zip(parts, others, strict=True)]).sum()
