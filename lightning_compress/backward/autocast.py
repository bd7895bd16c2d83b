"""What autocast means to layers that PyTorch does not know."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """In what a layer with this input is to compute; None: as it is, for want of autocast or in float64.

    PyTorch's own layers are not cast down from float64 either.
    """
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
