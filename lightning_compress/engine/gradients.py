"""Gradients into a vector on the CPU, with a residual or without, in one pass; and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.core.state import State, place_of


def add_gradients(gradients: Sequence[Tensor], residual: State, decay: float) -> bool:
    """Write ``gradient + decay * committed`` to the pending numbers.

    Args:
        gradients: on the CPU, one-dimensional, contiguous, of the residual's segments that are not empty, in order.
        residual: float32, not touched in this step.
        decay: of what stayed behind.

    Returns:
        whether every gradient is float32, no number is above ``kernels.LARGEST`` and none is all zeros; if not, what
        is pending has no meaning.
    """
    fast = kernels.backend(__name__, torch.device("cpu"), "numba") if decay == 1 else None
    places = [place_of(segment) for segment in residual.layout.segments if segment.numel]
    for place, gradient in zip(places, gradients, strict=True):
        if gradient.dtype != torch.float32:
            return False
        before, after = residual.committed[place], residual.pending[place]
        if fast:
            largest = fast.add(gradient.numpy(), gradient.numpy().view(np.int32), before.numpy(), after.numpy())
            sound = kernels.sound(largest)
        else:
            lowest, highest = torch.aminmax(gradient)
            sound = 0.0 < float(torch.maximum(-lowest, highest)) <= kernels.LARGEST
            torch.add(gradient, before, alpha=decay, out=after)
        if not sound:
            return False
    return True


def copy_gradients(gradients: Sequence[Tensor], out: Tensor) -> bool:
    """Copy gradients side by side.

    Args:
        gradients: contiguous, one-dimensional.
        out: float32, as long as all of them.

    Returns:
        whether no number is known to be above ``kernels.LARGEST``; if not, ``out`` has no meaning.
    """
    fast = kernels.backend(__name__, out.device, "numba")
    if not fast or any(gradient.dtype != torch.float32 for gradient in gradients):
        return False
    parts = out.split([len(gradient) for gradient in gradients])
    return all(
        fast.copy(gradient.numpy(), gradient.numpy().view(np.int32), part.numpy()) <= kernels.LARGEST_BITS
        for gradient, part in zip(gradients, parts, strict=True)
    )


def clean(gradient: Tensor, limit: float) -> Tensor:
    """Write zeros where a gradient is not finite; on an accelerator without waiting for the result.

    Args:
        gradient: float32 ``[n]``; becomes 0 at least where it is not finite.
        limit: a larger magnitude counts as not finite, and stays.

    Returns:
        float32 scalar: 0.0, or NaN where anything was not finite.
    """
    if fused := kernels.backend(__name__, gradient.device, "triton"):
        flag = torch.zeros((), device=gradient.device)
        fused.clean(gradient, limit, flag)
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
    if fused := kernels.backend(__name__, mean.device, "triton"):
        fused.add_flag(flag, mean)
    elif mean.device.type != "cpu" or float(flag) != 0.0:
        mean.add_(flag)
