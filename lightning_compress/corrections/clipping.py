"""Clipping on each rank, before anything is averaged."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_each(gradients: list[Tensor], clip: float, ranks: int) -> None:
    """Clip each parameter's gradient to a norm of ``clip * ranks^(1/2)``, in place.

    A rank's share ``g / W`` of the mean has then a norm of ``clip * W^(-1/2)`` at most, and the mean of independent
    gradients one of about ``clip`` (Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.2).

    Args:
        gradients: of the parameters, float32, not empty.
        clip: the norm, above 0.
        ranks: how many there are.
    """
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (clip * ranks**0.5 / norms).clamp_(max=1)
    torch._foreach_mul_(gradients, list(factors.unbind()))
