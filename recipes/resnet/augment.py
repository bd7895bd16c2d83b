"""Random crops and flips."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["crop_and_flip"]


def crop_and_flip(images: Tensor, bits: Tensor, padding: int = 4) -> Tensor:
    """Pad with zeros, cut a window of the old size, mirror half of the images (He et al. 2015, section 4.2).

    Args:
        images: [N, C, H, W], any dtype.
        bits: non-negative integers [N] that decide, as from :func:`recipes.draws.draw`.
        padding: pixels on each side, at least 0; there are ``(2 padding + 1)^2`` windows.

    Returns:
        [N, C, H, W], a new tensor of the same dtype.
    """
    count, channels, height, width = images.shape
    places = 2 * padding + 1
    top, left, flip = bits % places, bits // places % places, bits // places**2 % 2
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(count, -1)
    columns = left[:, None] + torch.where(flip[:, None] == 1, width - 1 - columns, columns)
    return F.pad(images, (padding,) * 4)[
        torch.arange(count, device=images.device)[:, None, None, None],
        torch.arange(channels, device=images.device)[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
