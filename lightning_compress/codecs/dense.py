"""No compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan, Shard, Shards
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Source


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
        fast = kernels.backend(__name__, device, "numba")
        return KernelPlan(layout, 4 * layout.numel, fused.Floats()) if fused else _DensePlan(layout, fast)


class _DensePlan(Plan):
    def __init__(self, layout: Layout, fast: ModuleType | None) -> None:
        super().__init__(layout)
        self.message_size = 4 * layout.numel
        self._fast: Any = fast

    def shards(self, shards: Sequence[Shard], device: torch.device) -> Shards | None:
        """See ``ShardCoder``."""
        if not self._fast or not all(isinstance(shard.coder, _DensePlan) for shard in shards):
            return None
        return Shards.of([(shard.start, shard.numel, shard.at) for shard in shards], shards, device)

    def encode_shards(self, source: Source, rest: Tensor | None, messages: Tensor, shards: Shards, key: int) -> None:
        """See ``ShardCoder``."""
        self._fast.encode_shards(source.into(rest).numpy(), shards.table.numpy(), messages.view(-1).numpy())

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor, weight: float, accumulate: bool, skip: int | None
    ) -> None:
        """See ``ShardCoder``."""
        inputs = messages.view(-1).numpy(), shards.table.numpy(), out.numpy(), np.float32(weight), accumulate
        self._fast.decode_shards(*inputs)

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
