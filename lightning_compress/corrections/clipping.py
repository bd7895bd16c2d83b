"""Clipping of each rank's gradients, before they are averaged."""

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
    """Settings of ``Clip``.

    Args:
        norm: the norm to clip to, above 0.
        by: "parameter" clips each parameter's gradient, "bucket" clips all gradients of a bucket by their joint norm.

    Raises:
        ValueError: a setting is out of range.
    """

    norm: float
    by: ClipBy = "parameter"

    def __post_init__(self) -> None:
        if isinstance(self.norm, bool) or not isinstance(self.norm, (int, float)) or not 0 < self.norm < math.inf:
            raise ValueError(f"local_clip_norm={self.norm!r} must be a finite number above 0, or null for no clipping")
        if self.by not in get_args(ClipBy):
            raise ValueError(
                f"local_clip_norm={{'by': {self.by!r}}}: it must be one of {', '.join(map(repr, get_args(ClipBy)))}"
            )


@dataclass(frozen=True)
class Clip(Stage):
    """Clip each parameter's gradient, or all gradients of a bucket together, to the norm ``clipping.norm * sqrt(W)``.

    W is the number of ranks. A rank's share ``g / W`` of the mean then has at most the norm ``norm / sqrt(W)``, and the
    mean of independent gradients about ``norm``. As with ``torch.nn.utils.clip_grad_norm_``, a gradient whose norm
    overflows float32 (from 1.8e19 on) becomes 0.

    Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.2.

    Args:
        clipping: the norm, and whether it is that of a parameter or of a bucket.
        ranks: W.
    """

    clipping: Clipping
    ranks: int

    def factors(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the factors of these gradients, in [0, 1]: float32 ``[parameters]``."""
        norms = torch.stack(torch._foreach_norm(list(gradients)))
        norms = norms.norm().expand_as(norms) if self.clipping.by == "bucket" else norms
        return torch.clamp(self.clipping.norm * self.ranks**0.5 / norms, max=1)

    def before(self, vector: Vector) -> None:
        """See ``Stage``."""
        vector.rescale(self.factors)
