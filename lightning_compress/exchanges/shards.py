"""The messages of many shards, encoded and decoded by one call for each section of the vector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.codec import KernelPlan, Plan, Shard, ShardCoder, Shards
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.random import mix
from lightning_compress.core.source import Source
from lightning_compress.core.told import Fold
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
        together: of each section, by its number: what encodes shards together, which ones, and whether what encoding
            leaves is kept.
        alone: all other shards, such as a last one whose last block is shorter.
        meter: records encoding and decoding time.
    """

    together: Mapping[int, tuple[ShardCoder, Shards, bool]]
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
        together: dict[int, tuple[ShardCoder, Shards, bool]] = {}
        alone: list[_Alone] = []
        for section, shards in by_section.items():
            several = len(messages) > 1 or fused
            count = next(
                (n for n in (len(shards), len(shards) - 1) if n and several and _planned(shards[:n], device)), 0
            )
            if planned := _planned(shards[:count], device):
                together[section] = *planned, shards[0].kept
            alone += shards[count:]
        return cls(together, alone, meter)

    def encode(self, source: Source, vector: Tensor, messages: Tensor, key: int, keep: bool) -> None:
        """Encode the shards of a source; see ``MessagePlan.encode``. ``key`` lacks the peer."""
        keep = keep or self.meter.sampling
        with self.meter.encode:
            for coder, shards, fed_back in self.together.values():
                coder.encode_shards(source, vector if keep or fed_back else None, messages, shards, key)
            for each in self.alone:
                rest, own = vector[each.span] if keep or each.kept else None, mix(each.peer, key=key)
                encode_section(each.plan, source.part(each.span), rest, each.message(messages), own, each.number)

    def without(self, sections: Collection[int]) -> ShardMessages:
        """Return those of other sections."""
        left = {number: each for number, each in self.together.items() if number not in sections}
        return replace(self, together=left)

    def decode(self, messages: Tensor, out: Out, weight: float, accumulate: bool, fold: Fold | None = None) -> None:
        """Decode the shards; see ``ShardCoder.decode_shards``."""
        with self.meter.decode:
            for coder, shards, _ in self.together.values():
                coder.decode_shards(messages, shards, out, weight, accumulate, fold)
            for each in self.alone:
                part, plan = out[each.span], each.plan
                vector = room_for(part, plan.in_pieces)
                if fold is None:
                    plan.decode(each.message(messages)[None], vector, weight, accumulate)
                for others in () if fold is None else (messages[: fold.rank], messages[fold.rank + 1 :]):
                    if len(others):
                        plan.decode(others[:, each.at : each.at + plan.message_size], vector, weight, accumulate)
                if vector is not part:
                    part.copy_(vector)


@runtime_checkable
class PassingCoder(ShardCoder, Protocol):
    """A kernel that encodes a sum where it adds it up."""

    def pass_on(self, messages: Tensor, shards: Shards, vector: Tensor, fold: Fold, sent: Shards, keep: bool) -> None:
        """Add what arrived for a shard to the vector there, and encode the sum.

        Args:
            messages: see ``ShardCoder.decode_shards``.
            shards: one, in each row of ``messages``.
            vector: float32.
            fold: see ``ShardCoder.decode_shards``.
            sent: the same shard, in the sum's message ``fold.own``.
            keep: leave in the vector what was not encoded.
        """


class Passed:
    """Adds up and encodes by one call for each section what a shard's owner passes on.

    Args:
        added: what arrives for the own shard.
        sums: the sum that is sent on.
    """

    def __init__(self, added: ShardMessages, sums: ShardMessages) -> None:
        self._meter = added.meter
        self._calls: dict[int, tuple[PassingCoder, Shards, Shards, bool]] = {}
        for number, (coder, shards, _) in added.together.items():
            coder_of_sums, sent, kept = sums.together.get(number, (None, shards, False))
            if isinstance(coder, PassingCoder) and type(coder_of_sums) is type(coder):
                self._calls[number] = coder, shards, sent, kept

    @property
    def sections(self) -> Collection[int]:
        """The numbers of the sections of which this is possible."""
        return self._calls.keys()

    def run(self, received: Tensor, vector: Tensor, fold: Fold) -> None:
        """Add and encode; see ``PassingCoder``."""
        with self._meter.decode:
            for coder, shards, sent, kept in self._calls.values():
                coder.pass_on(received, shards, vector, fold, sent, kept or self._meter.sampling)


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
