"""Clipping on each rank, before anything is averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip_factors(gradients: Sequence[Tensor], clip: float, ranks: int) -> Tensor:
    """What ``clip_each`` multiplies with, float32 ``[parameters]``."""
    norms = torch.stack(torch._foreach_norm(list(gradients)))
    return torch.clamp(clip * ranks**0.5 / norms, max=1)


def clip_each(gradients: list[Tensor], clip: float, ranks: int) -> None:
    """Clip each parameter's gradient to a norm of ``clip * ranks^(1/2)``, in place.

    A rank's share ``g / W`` of the mean has then a norm of ``clip * W^(-1/2)`` at most, and the mean of independent
    gradients one of about ``clip`` (Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.2).

    Args:
        gradients: of the parameters, float32, not empty.
        clip: the norm, above 0.
        ranks: how many there are.
    """
    torch._foreach_mul_(gradients, list(clip_factors(gradients, clip, ranks).unbind()))
