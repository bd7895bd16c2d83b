"""Clipping on each rank, before anything is averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

ClipBy = Literal["parameter", "bucket"]


def check_by(name: str, given: object) -> None:
    """Refuse what is no ``ClipBy``.

    Raises:
        ValueError: it is none.
    """
    if given not in get_args(ClipBy):
        raise ValueError(f"{name}={given!r} must be one of {', '.join(map(repr, get_args(ClipBy)))}")


def clip_factors(gradients: Sequence[Tensor], clip: float, ranks: int, by: ClipBy) -> Tensor:
    """What ``clip_each`` multiplies with, float32 ``[parameters]``."""
    norms = torch.stack(torch._foreach_norm(list(gradients)))
    norms = norms.norm().expand_as(norms) if by == "bucket" else norms
    return torch.clamp(clip * ranks**0.5 / norms, max=1)


def clip_each(gradients: list[Tensor], clip: float, ranks: int, by: ClipBy) -> None:
    """Clip each parameter's gradient, or all of them together, to a norm of ``clip * ranks^(1/2)``, in place.

    A rank's share ``g / W`` of the mean has then a norm of ``clip * W^(-1/2)`` at most, and the mean of independent
    gradients one of about ``clip`` (Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.2). As with
    ``torch.nn.utils.clip_grad_norm_``, a gradient whose norm is no float32 any more, from 1.8e19 on, becomes 0.

    Args:
        gradients: of the parameters of a bucket, float32, not empty.
        clip: the norm, above 0.
        ranks: how many there are.
        by: whose norm it is.
    """
    torch._foreach_mul_(gradients, list(clip_factors(gradients, clip, ranks, by).unbind()))
