"""The messages of many shards, encoded and decoded by one call for each section of the vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import KernelPlan, Plan, Shard, ShardCoder, Shards
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.random import mix
from lightning_compress.core.source import Source
from lightning_compress.exchanges.message import MessagePlan, Out, encode_section, room_for


class _Alone(NamedTuple):
    """A shard that is encoded and decoded by its own plan."""

    span: slice
    plan: Plan
    at: int
    peer: int
    number: int
    kept: bool

    def message(self, messages: Tensor) -> Tensor:
        return messages.view(-1)[self.at : self.at + self.plan.message_size]


@dataclass(frozen=True)
class ShardMessages:
    """Messages that lie in one piece of memory, without their heads.

    Args:
        together: of each section: what encodes shards together, which ones, and whether what encoding leaves is kept.
        alone: all other shards, such as a last one whose last block is shorter.
        meter: records encoding and decoding time.
    """

    together: Sequence[tuple[ShardCoder, Shards, bool]]
    alone: Sequence[_Alone]
    meter: Meter

    @classmethod
    def of(cls, messages: Sequence[tuple[int, MessagePlan, int]], device: torch.device, meter: Meter) -> ShardMessages:
        """Plan the calls.

        Args:
            messages: of each, the peer whose number is mixed into its key, its plan, whose messages do not vary in
                length, and its first byte in the memory.
            device: of vectors and messages.
            meter: see the class.
        """
        by_section: dict[int, list[_Alone]] = {}
        for peer, plan, place in messages:
            for number, (section, span, part, first, kept) in enumerate(plan.parts):
                by_section.setdefault(section, []).append(_Alone(span, part, place + first, peer, number, kept))
        fused = kernels.compiler(device) == "triton"
        together, alone = [], []
        for shards in by_section.values():
            several = len(messages) > 1 or fused
            count = next(
                (n for n in (len(shards), len(shards) - 1) if n and several and _planned(shards[:n], device)), 0
            )
            if planned := _planned(shards[:count], device):
                together.append((*planned, shards[0].kept))
            alone += shards[count:]
        return cls(together, alone, meter)

    def encode(self, source: Source, vector: Tensor, messages: Tensor, key: int, keep: bool) -> None:
        """Encode the shards of a source; see ``MessagePlan.encode``. ``key`` lacks the peer."""
        keep = keep or self.meter.sampling
        with self.meter.encode:
            for coder, shards, fed_back in self.together:
                coder.encode_shards(source, vector if keep or fed_back else None, messages, shards, key)
            for each in self.alone:
                rest, own = vector[each.span] if keep or each.kept else None, mix(each.peer, key=key)
                encode_section(each.plan, source.part(each.span), rest, each.message(messages), own, each.number)

    def decode(self, messages: Tensor, out: Out, weight: float, accumulate: bool, skip: int | None = None) -> None:
        """Decode the shards; see ``ShardCoder.decode_shards``."""
        with self.meter.decode:
            for coder, shards, _ in self.together:
                coder.decode_shards(messages, shards, out, weight, accumulate, skip)
            for each in self.alone:
                part, plan = out[each.span], each.plan
                vector = room_for(part, plan.in_pieces)
                if skip is None:
                    plan.decode(each.message(messages)[None], vector, weight, accumulate)
                for others in () if skip is None else (messages[:skip], messages[skip + 1 :]):
                    if len(others):
                        plan.decode(others[:, each.at : each.at + plan.message_size], vector, weight, accumulate)
                if vector is not part:
                    part.copy_(vector)


def _planned(shards: Sequence[_Alone], device: torch.device) -> tuple[ShardCoder, Shards] | None:
    """Return what encodes these shards together, or None if nothing does."""
    coders = [each.plan.kernel if isinstance(each.plan, KernelPlan) else each.plan for each in shards]
    if not coders or not isinstance(coders[0], ShardCoder):
        return None
    planned = coders[0].shards(
        [
            Shard(
                each.span.start, each.plan.layout.numel, coder, each.at, each.plan.message_size, each.peer, each.number
            )
            for each, coder in zip(shards, coders, strict=True)
        ],
        device,
    )
    return (coders[0], planned) if planned else None
