"""Gradients that are not finite: codecs are given zeros in their place, and a flag carries the news."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress import kernels


def clean(gradient: Tensor, limit: float) -> Tensor:
    """Write zeros where a gradient is not finite; on an accelerator nobody waits for what is found.

    Args:
        gradient: float32 ``[n]``; becomes 0 at least where it is not finite.
        limit: a larger magnitude counts as not finite, and stays.

    Returns:
        float32 scalar: 0.0, or NaN where anything was not finite.
    """
    if fused := kernels.fused(gradient.device):
        flag = torch.zeros((), device=gradient.device)
        fused.vectors.clean(gradient, limit, flag)
        return flag
    lowest, highest = torch.aminmax(gradient)
    flag = (lowest + highest) * 0.0
    if limit < torch.inf:
        flag.masked_fill_(torch.maximum(-lowest, highest) > limit, torch.nan)
    if gradient.device.type != "cpu" or flag.isnan():
        gradient.masked_fill_(flag.isnan(), 0.0)
    return flag


def spoil(mean: Tensor, flag: Tensor) -> None:
    """Make a mean, float32 ``[n]``, what its flag says: itself at 0.0, and NaN everywhere at NaN."""
    if fused := kernels.fused(mean.device):
        fused.vectors.add_flag(flag, mean)
    elif mean.device.type != "cpu" or float(flag) != 0.0:
        mean.add_(flag)
