"""No compression: the vector as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan
from lightning_compress.core.layout import Layout


@dataclass(frozen=True)
class Dense(Codec):
    """Send every element as float32: 32 bits per element, nothing lost, nothing left in the vector, no state.

    It carries what is too small or too delicate to compress, and shows what the machinery itself costs.
    """

    name: ClassVar[str] = "none"
    elementwise: ClassVar[bool] = True
    casts: ClassVar[bool] = True
    sum_dtype: ClassVar[torch.dtype | None] = torch.float32
    keeps_zeros: ClassVar[bool] = True

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; ``summands`` has no effect."""
        return _DensePlan(layout)


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
        for number, message in enumerate(messages):
            if accumulate or number:
                out.add_(message.view(torch.float32), alpha=weight)
            else:
                torch.mul(message.view(torch.float32), weight, out=out)
