"""Clipping on each rank, before anything is averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_compress.core.vector import Stage, Vector

ClipBy = Literal["parameter", "bucket"]


def check_by(name: str, given: object) -> None:
    """Refuse what is no ``ClipBy``.

    Raises:
        ValueError: it is none.
    """
    if given not in get_args(ClipBy):
        raise ValueError(f"{name}={given!r} must be one of {', '.join(map(repr, get_args(ClipBy)))}")


@dataclass(frozen=True)
class Clip(Stage):
    """Clip each parameter's gradient, or all of them together, to a norm of ``clip * ranks^(1/2)``.

    A rank's share ``g / W`` of the mean has then a norm of ``clip * W^(-1/2)`` at most, and the mean of independent
    gradients one of about ``clip`` (Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.2). As with
    ``torch.nn.utils.clip_grad_norm_``, a gradient whose norm is no float32 any more, from 1.8e19 on, becomes 0.

    Args:
        clip: the norm, above 0.
        ranks: how many there are.
        by: whose norm it is, of those in a bucket.
    """

    clip: float
    ranks: int
    by: ClipBy

    def factors(self, gradients: Sequence[Tensor]) -> Tensor:
        """What these gradients are multiplied by, float32 ``[parameters]``."""
        norms = torch.stack(torch._foreach_norm(list(gradients)))
        norms = norms.norm().expand_as(norms) if self.by == "bucket" else norms
        return torch.clamp(self.clip * self.ranks**0.5 / norms, max=1)

    def before(self, vector: Vector) -> None:
        """See ``Stage``."""
        gradients = vector.split(vector.whole())
        torch._foreach_mul_(gradients, list(self.factors(gradients).unbind()))
