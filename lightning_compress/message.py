"""One message per group: a flag, then a section for every codec that the rules chose.

    | flag, 16 bytes | section | padding to 16 bytes | section | ...

The flag is 0.0, or NaN on a rank whose gradient is not finite; it is summed as the first section is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_compress.codecs.base import ALIGNMENT, Codec, Plan, aligned
from lightning_compress.layout import Layout
from lightning_compress.meter import Meter


@dataclass(frozen=True)
class Section:
    """A stretch of a vector, beginning at ``start``, that one codec takes care of."""

    codec: Codec
    layout: Layout
    start: int

    @property
    def stop(self) -> int:
        """One past the section's last element in the vector."""
        return self.start + self.layout.numel

    def shard(self, index: int, count: int) -> Section:
        """One of ``count`` parts of nearly equal size, cut on the codec's block boundaries."""
        blocks = -(-self.layout.numel // self.codec.block)
        first, last = (
            min(blocks * position // count * self.codec.block, self.layout.numel) for position in (index, index + 1)
        )
        return Section(self.codec, self.layout.cut(first, last), self.start + first)


@dataclass(frozen=True)
class SumRun:
    """Bytes ``[start, stop)`` of a message, which may be summed element by element as ``dtype``."""

    dtype: torch.dtype
    start: int
    stop: int


class MessagePlan:
    """Encodes stretches of a vector into one message, and back.

    Args:
        sections: the stretches, each with its codec; they need not cover the vector.
        device: where vectors and messages are.
        meter: gets the time of encoding and decoding.
        summands: how many messages are summed in the message's own dtype.

    Attributes:
        size: bytes of a message.
        sum_runs: what to sum, and how; None if some section cannot be summed.
    """

    def __init__(self, sections: Sequence[Section], device: torch.device, meter: Meter, summands: int = 1) -> None:
        self._meter = meter
        self._parts: list[tuple[slice, slice, Plan]] = []
        offset = ALIGNMENT
        sections = [section for section in sections if section.layout.numel]
        for section in sections:
            plan = section.codec.plan(section.layout, device, summands)
            stretch = slice(section.start, section.stop)
            self._parts.append((stretch, slice(offset, offset + plan.message_size), plan))
            offset += aligned(plan.message_size)
        self.size = offset
        self.sum_runs = self._find_sum_runs([section.codec.sum_dtype for section in sections])
        self._flag_dtype = self.sum_runs[0].dtype if self.sum_runs else torch.float32

    def _find_sum_runs(self, dtypes: Sequence[torch.dtype | None]) -> tuple[SumRun, ...] | None:
        runs: list[SumRun] = []
        for dtype, (_, place, plan) in zip(dtypes, self._parts, strict=True):
            if dtype is None:
                return None
            end = place.start + aligned(plan.message_size)
            if runs and runs[-1].dtype == dtype:
                runs[-1] = SumRun(dtype, runs[-1].start, end)
            else:
                runs.append(SumRun(dtype, place.start if runs else 0, end))
        return tuple(runs) or (SumRun(torch.float32, 0, ALIGNMENT),)

    def encode(self, vector: Tensor, message: Tensor, key: int, flag: Tensor) -> None:
        """Move the stretches into ``message``, uint8 ``[size]``, whose padding the caller made zero once.

        Args:
            vector: float32, the whole group's; finite.
            message: uint8 ``[size]``.
            key: where randomness comes from.
            flag: float32 scalar, 0.0 or NaN.
        """
        with self._meter.span("encode"):
            message[:ALIGNMENT].view(self._flag_dtype)[:1].copy_(flag)
            for stretch, place, plan in self._parts:
                plan.encode(vector[stretch], message[place], key)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Write ``weight`` times the sum of ``messages``, uint8 ``[M, size]``, into the stretches of ``out``."""
        with self._meter.span("decode"):
            for stretch, place, plan in self._parts:
                plan.decode(messages[:, place], out[stretch], weight, accumulate)

    def flags(self, messages: Tensor) -> Tensor:
        """Sum of the flags of ``messages``, uint8 ``[M, size]``: a float32 scalar, 0.0 or NaN."""
        return messages[:, :ALIGNMENT].contiguous().view(self._flag_dtype)[:, 0].float().sum()
