"""Gradients into a vector on the CPU, with what stayed behind or without, in one pass over either."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.state import State, place_of


def add_gradients(gradients: Sequence[Tensor], residual: State, decay: float) -> bool:
    """Write ``gradient + decay * committed`` to the pending numbers.

    Args:
        gradients: on the CPU, one-dimensional, contiguous, of the residual's segments that are not empty, in order.
        residual: float32, not touched in this step.
        decay: of what stayed behind.

    Returns:
        whether every gradient is float32 and finite and none is all zeros; if not, what is pending has no meaning.
    """
    fast = kernels.of(torch.device("cpu")) if decay == 1 else None
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
            sound = bool((lowest * 0.0 + highest * 0.0 == 0) & ((lowest != 0) | (highest != 0)))
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
        whether they are known to be finite; if not, ``out`` has no meaning.
    """
    fast = kernels.of(out.device)
    if not fast or any(gradient.dtype != torch.float32 for gradient in gradients):
        return False
    parts = out.split([len(gradient) for gradient in gradients])
    return all(
        fast.copy(gradient.numpy(), gradient.numpy().view(np.int32), part.numpy()) < kernels.INFINITE
        for gradient, part in zip(gradients, parts, strict=True)
    )
