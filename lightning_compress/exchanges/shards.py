"""The messages of many shards, encoded and decoded by one launch for each section of the vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lightning_compress.codecs.codec import KernelPlan, Shard, ShardKernel, Shards
from lightning_compress.collectives.counting import Meter
from lightning_compress.exchanges.message import MessagePlan
from lightning_compress.kernels import Summands


@dataclass(frozen=True)
class ShardMessages:
    """Messages that lie in one piece of memory; heads are not part of the work.

    Args:
        launches: of each section: its kernel, its shards, and whether what encoding leaves is kept.
        meter: records encoding and decoding time.
    """

    launches: Sequence[tuple[ShardKernel, Shards, bool]]
    meter: Meter

    @classmethod
    def of(
        cls, messages: Sequence[tuple[int, MessagePlan, int]], device: torch.device, meter: Meter
    ) -> ShardMessages | None:
        """Plan the launches; return None if a codec has no kernel for that.

        Args:
            messages: of each, the peer whose number is mixed into its key, its plan, and its first byte in the memory.
            device: of vectors and messages.
            meter: see the class.
        """
        by_section: dict[int, list[Shard]] = {}
        keeps: dict[int, bool] = {}
        for peer, plan, place in messages:
            if plan.variable or plan.draws_alike:
                return None
            for number, (section, span, part, first, kept) in enumerate(plan.parts):
                if not isinstance(part, KernelPlan) or not hasattr(part.kernel, "shards"):
                    return None
                size = part.layout.numel, part.kernel, place + first, part.message_size
                by_section.setdefault(section, []).append(Shard(span.start, *size, peer, number))
                keeps[section] = kept
        launches = []
        for section, shards in by_section.items():
            kernel = cast(ShardKernel, shards[0].kernel)
            planned = kernel.shards(shards, device)
            if planned is None:
                return None
            launches.append((kernel, planned, keeps[section]))
        return cls(launches, meter)

    def encode(self, vector: Tensor, messages: Tensor, key: int, keep: bool, summands: Summands = None) -> None:
        """Encode the shards of a vector; see ``MessagePlan.encode``. ``key`` lacks the peer."""
        with self.meter.encode:
            for kernel, shards, fed_back in self.launches:
                kept = keep or fed_back or summands is not None or self.meter.sampling
                kernel.encode_shards(vector, summands, messages, shards, key, kept)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool, skip: int | None = None) -> None:
        """Decode the shards; see ``ShardKernel.decode_shards``."""
        with self.meter.decode:
            for kernel, shards, _ in self.launches:
                kernel.decode_shards(messages, shards, out, weight, accumulate, skip)
