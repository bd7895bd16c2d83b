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
from lightning_compress.codecs.codec import Codec, KernelPlan, Plan, Shard, Shards, SourcePlan
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import NOTHING, Pieces, Source, place_of
from lightning_compress.core.told import Fold


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


class _DensePlan(SourcePlan):
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
        left = NOTHING if rest is None else rest.numpy()
        source.feed(self._fast.encode_shards, shards.table.numpy(), messages.view(-1).numpy(), left)

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor | Pieces, weight: float, accumulate: bool, fold: Fold | None
    ) -> None:
        """See ``ShardCoder``."""
        inputs = messages.view(-1).numpy(), shards.table.numpy(), place_of(out), np.float32(weight), accumulate
        self._fast.decode_shards(*inputs)

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See ``Plan.encode_from``."""
        source.into(message.view(torch.float32))
        if rest is not None:
            rest.zero_()

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        self.check(out, messages)
        if not accumulate and not len(messages):
            out.zero_()
        for index, message in enumerate(messages):
            if accumulate or index:
                out.add_(message.view(torch.float32), alpha=weight)
            else:
                torch.mul(message.view(torch.float32), weight, out=out)
