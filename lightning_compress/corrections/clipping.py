"""Clipping on each rank, before anything is averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_compress.core.vector import Stage, Vector

ClipBy = Literal["parameter", "bucket"]


@dataclass(frozen=True)
class Clipping:
    """What the gradients of a rank are clipped to; see ``Clip``.

    Args:
        norm: above 0.
        by: whose norm it is: that of each "parameter", or that of all in a "bucket".

    Raises:
        ValueError: they are none of these.
    """

    norm: float
    by: ClipBy = "parameter"

    def __post_init__(self) -> None:
        if isinstance(self.norm, bool) or not isinstance(self.norm, (int, float)) or not 0 < self.norm < math.inf:
            raise ValueError(f"local_clip_norm={self.norm!r} must be a norm above 0, or null for no clipping")
        if self.by not in get_args(ClipBy):
            raise ValueError(
                f"local_clip_norm={{'by': {self.by!r}}}: it must be one of {', '.join(map(repr, get_args(ClipBy)))}"
            )


@dataclass(frozen=True)
class Clip(Stage):
    """Clip each parameter's gradient, or all of them together, to a norm of ``clipping.norm * ranks^(1/2)``.

    A rank's share ``g / W`` of the mean has then a norm of ``norm * W^(-1/2)`` at most, and the mean of independent
    gradients one of about ``norm`` (Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.2). As with
    ``torch.nn.utils.clip_grad_norm_``, a gradient whose norm is no float32 any more, from 1.8e19 on, becomes 0.

    Args:
        clipping: to which norm, and whose.
        ranks: how many there are.
    """

    clipping: Clipping
    ranks: int

    def factors(self, gradients: Sequence[Tensor]) -> Tensor:
        """What these gradients are multiplied by, float32 ``[parameters]``."""
        norms = torch.stack(torch._foreach_norm(list(gradients)))
        norms = norms.norm().expand_as(norms) if self.clipping.by == "bucket" else norms
        return torch.clamp(self.clipping.norm * self.ranks**0.5 / norms, max=1)

    def before(self, vector: Vector) -> None:
        """See ``Stage``."""
        vector.rescale(self.factors)
