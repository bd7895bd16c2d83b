"""No compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan
from lightning_compress.core.layout import Layout


@dataclass(frozen=True)
class Dense(Codec):
    """Send every element as float32: 32 bits per element, lossless, no residual, no state.

    It sends parameters that are too small or too sensitive to compress. As a baseline it shows the overhead of this
    package.
    """

    name: ClassVar[str] = "none"
    elementwise: ClassVar[bool] = True
    is_cast: ClassVar[bool] = True
    sum_dtype: ClassVar[torch.dtype | None] = torch.float32
    keeps_zeros: ClassVar[bool] = True

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; ``summands`` is ignored."""
        fused = kernels.backend(__name__, device, "triton")
        return KernelPlan(layout, 4 * layout.numel, fused.Floats()) if fused else _DensePlan(layout)


class _DensePlan(Plan):
    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.message_size = 4 * layout.numel

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        self.check(vector, message)
        message.view(torch.float32).copy_(vector)
        vector.zero_()

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        if not accumulate and not len(messages):
            out.zero_()
        for index, message in enumerate(messages):
            if accumulate or index:
                out.add_(message.view(torch.float32), alpha=weight)
            else:
                torch.mul(message.view(torch.float32), weight, out=out)
