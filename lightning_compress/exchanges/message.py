"""One message per group: a header, then a section for every codec that the rules chose.

    | header: flag, lengths | padding to 16 bytes | section | padding to 16 bytes | section | ...

The flag is 0.0, or NaN on a rank whose gradient is not finite; it is summed as the first section is. It is infinite on
a rank that could not read what it was sent. The lengths of the sections, int64, are there if one of them varies; then
sections stand where the one before ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from lightning_compress.codecs import Rotated
from lightning_compress.codecs.codec import ALIGNMENT, Codec, FusedPlan, Method, Plan, aligned
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix, permutation
from lightning_compress.core.workspace import scratch
from lightning_compress.kernels import Summands

Out = Tensor | Sequence[Tensor]
"""Where a mean goes: float32 ``[numel]``, or in pieces, a tensor for each segment that is not empty."""
LENGTHS, LENGTH = 8, 8
"""Where the lengths of the sections begin in a message, and the bytes of one."""

PRECISE = Rotated(bits=4)
"""Encodes sums of what coarse biased methods sent, where no residual brings back what encoding leaves: its noise is a
tenth of that of signs, and right on average."""
_SAMPLE = Layout.of([("matrix", (256, 256))])


@dataclass(frozen=True)
class Section:
    """The part of a vector, from ``start`` on, that one method compresses.

    Attributes:
        fed_back: what encoding leaves in the part is kept, as the local residual.
        number: index of the method among those of the rules, which names what a reducer keeps.
        precise: sums of it are encoded by ``PRECISE``, where that has more bits: its own method, which is biased, would
            need a residual.
        unit: shards are cut at multiples of so many elements; None: the codec's own.
    """

    method: Method
    layout: Layout
    start: int
    fed_back: bool = True
    number: int = 0
    precise: bool = False
    unit: int | None = None

    @property
    def codec(self) -> Codec:
        """The method, of a section that is part of a message."""
        assert isinstance(self.method, Codec)
        return self.method

    def codec_of_sums(self, ranks: int) -> Codec:
        """By which the sum of what so many ranks sent is encoded."""
        if self.precise and ranks > 1 and _bits(self.codec) < _bits(PRECISE):
            return PRECISE
        return self.codec.refined(ranks)

    @property
    def stop(self) -> int:
        """One past the section's last element in the vector."""
        return self.start + self.layout.numel

    @property
    def span(self) -> slice:
        """Its elements of the vector."""
        return slice(self.start, self.stop)

    def shard(self, index: int, count: int) -> Section:
        """One of ``count`` parts of nearly equal size, cut on the codec's block boundaries."""
        unit = self.unit or self.codec.block
        blocks = -(-self.layout.numel // unit)
        first, last = (min(blocks * position // count * unit, self.layout.numel) for position in (index, index + 1))
        return replace(self, layout=self.layout.cut(first, last), start=self.start + first)


@cache
def _bits(codec: Codec) -> float:
    """Of a message, per element."""
    return 8 * codec.plan(_SAMPLE, torch.device("meta")).message_size / _SAMPLE.numel


def codecs_of(sections: Sequence[Section]) -> list[Codec]:
    """All that may encode something of these sections, but for ``Codec.refined``."""
    return [section.codec for section in sections] + [PRECISE] * any(section.precise for section in sections)


@dataclass(frozen=True)
class SumRun:
    """Bytes ``[start, stop)`` of a message, which may be summed element by element as ``dtype``."""

    dtype: torch.dtype
    start: int
    stop: int


class MessagePlan:
    """Encodes sections of a vector into one message, and back.

    Args:
        sections: those of codecs; they need not cover the vector.
        device: where vectors and messages are.
        meter: gets the time of encoding and decoding.
        summands: how many messages are summed in the message's own dtype.

    Attributes:
        size: bytes of a message, or the most that one may take.
        expected_size: bytes that it usually takes.
        variable: messages differ in length.
        correlated: ``correlate`` has an effect.
        in_pieces: a section at least is decoded into several tensors as fast as into one.
        sum_runs: what to sum, and how; None if some section cannot be summed.
    """

    def __init__(self, sections: Sequence[Section], device: torch.device, meter: Meter, summands: int = 1) -> None:
        self._meter = meter
        sections = [section for section in sections if section.layout.numel]
        plans = [section.codec.plan(section.layout, device, summands) for section in sections]
        self._parts = [(section.span, plan) for section, plan in zip(sections, plans, strict=True)]
        self._sharing = [(number, plan) for number, plan in enumerate(plans) if type(plan).share is not Plan.share]
        self._correlated = [section.codec.correlated for section in sections]
        self.correlated = any(self._correlated)
        self._fed_back = [section.fed_back for section in sections]
        self.variable = any(plan.variable for plan in plans)
        self._header = aligned(LENGTHS + LENGTH * len(plans)) if self.variable else ALIGNMENT
        self.size = self._header + sum(aligned(plan.message_size) for plan in plans)
        self.expected_size = self._header + sum(aligned(plan.expected_size) for plan in plans)
        self.in_pieces = not self.variable and any(plan.in_pieces for plan in plans)
        self._ends = [self._header + each for each in accumulate(aligned(plan.message_size) for plan in plans)]
        counts = [sum(segment.numel > 0 for segment in section.layout.segments) for section in sections]
        self._pieces = [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
        self._device = device
        self.sum_runs = self._find_sum_runs([section.codec.sum_dtype for section in sections])
        self._flag_dtype = self.sum_runs[0].dtype if self.sum_runs else torch.float32

    def _find_sum_runs(self, dtypes: Sequence[torch.dtype | None]) -> tuple[SumRun, ...] | None:
        runs: list[SumRun] = []
        start = self._header
        for dtype, (_, plan) in zip(dtypes, self._parts, strict=True):
            if dtype is None:
                return None
            end = start + aligned(plan.message_size)
            if runs and runs[-1].dtype == dtype:
                runs[-1] = SumRun(dtype, runs[-1].start, end)
            else:
                runs.append(SumRun(dtype, start if runs else 0, end))
            start = end
        return tuple(runs) or (SumRun(torch.float32, 0, ALIGNMENT),)

    @property
    def spans(self) -> list[slice]:
        """Its sections' elements of the vector."""
        return [span for span, _ in self._parts]

    def share(self, key: int) -> None:
        """Draw what all ranks must have in common; before ``encode`` and ``decode``, with the same key on all ranks."""
        for number, plan in self._sharing:
            plan.share(_own(key, number))

    def correlate(self, key: int, place: int, places: int) -> None:
        """Have errors cancel those of other ranks' messages for the same mean; see ``Plan.correlate``.

        For codecs that do so, before ``encode``. Never where sums of messages are encoded: these were rounded by the
        same random bits, and a number that depends on them is not rounded right on average.
        """
        for number, ((_, plan), correlated) in enumerate(zip(self._parts, self._correlated, strict=True)):
            if correlated:
                plan.correlate(_own(key, number), place, places)

    def agree(self, key: int, rank: int, size: int) -> None:
        """``share``, and ``correlate`` over all ranks, in an order that is drawn."""
        self.share(key)
        if self.correlated:
            self.correlate(key, permutation(key, size)[rank], size)

    def encode(
        self, vector: Tensor, message: Tensor, key: int, flag: Tensor, keep: bool = True, summands: Summands = None
    ) -> int:
        """Move the sections into ``message``, uint8 ``[size]``, whose padding the caller made zero once.

        Args:
            vector: float32, the whole group's; finite.
            message: uint8 ``[size]``.
            key: where randomness comes from; each section has a stream of its own.
            flag: float32 scalar, 0.0 or NaN.
            keep: the exchange uses what encoding leaves, also of sections that are not fed back.
            summands: gradient and residual, each as long as the vector, whose sum the vector becomes first.

        Returns:
            bytes of the message that are to be sent.
        """
        keeps = [keep or fed_back or summands is not None for fed_back in self._fed_back]
        given = vector.clone() if self._meter.sampling and not all(keeps) else None
        starts, end = [], self._header
        with self._meter.encode:
            message[:ALIGNMENT].view(self._flag_dtype)[:1].copy_(flag)
            for number, (span, plan) in enumerate(self._parts):
                part, own = message[end : end + plan.message_size], _own(key, number)
                added = summands and (summands[0][span], summands[1][span])
                if isinstance(plan, FusedPlan):
                    plan.encode(vector[span], part, own, keeps[number], added)
                else:
                    plan.encode(vector[span] if added is None else torch.add(*added, out=vector[span]), part, own)
                starts.append(end)
                if self.variable:
                    used = plan.used
                    end += aligned(used)
                    message[starts[-1] + used : end] = 0  # what an earlier, longer message left there
                else:
                    end = self._ends[number]
            if self.variable:
                lengths = torch.tensor([plan.used for _, plan in self._parts], dtype=torch.int64)
                message[LENGTHS : LENGTHS + LENGTH * len(lengths)].view(torch.int64).copy_(lengths)
        if given is not None:
            self._subtract_sent(given, vector, message, starts, keeps)
        return end

    def _subtract_sent(
        self, given: Tensor, vector: Tensor, message: Tensor, starts: list[int], keeps: list[bool]
    ) -> None:
        """Leave in sections that were only sent what encoding would have left: it is measured in this step."""
        for (span, plan), start, kept in zip(self._parts, starts, keeps, strict=True):
            if not kept:
                vector[span] = given[span]
                plan.decode(message[None, start : start + plan.used], vector[span], -1.0, accumulate=True)

    def decode(self, messages: Tensor, out: Out, weight: float, accumulate: bool) -> None:
        """Write ``weight`` times the sum of ``messages``, uint8 ``[M, size]``, into the sections of ``out``.

        Messages of variable length need be no longer than the longest of them.

        Raises:
            ValueError: messages are too short, lengths in one are not its own, or see ``Plan.decode``.
        """
        if messages.shape[1] < self._header or messages.shape[1] % ALIGNMENT:
            raise ValueError(f"messages of {messages.shape[1]} bytes are truncated; their header has {self._header}")
        with self._meter.decode:
            rows = self._starts_of(messages) if self.variable else [[self._header, *self._ends]]
            for number, (span, plan) in enumerate(self._parts):
                starts = [row[number] for row in rows]
                pieces = None if isinstance(out, Tensor) else list(out[self._pieces[number]])
                part = out[span] if isinstance(out, Tensor) else self._room(number, pieces)
                if len(set(starts)) <= 1:  # as always where no earlier section varies
                    start = starts[0] if starts else 0
                    plan.decode(messages[:, start : start + plan.message_size], part, weight, accumulate)
                else:
                    for row, start in enumerate(starts):
                        message = messages[row : row + 1, start : start + plan.message_size]
                        plan.decode(message, part, weight, accumulate or row > 0)
                if pieces is not None and isinstance(part, Tensor):
                    torch._foreach_copy_(pieces, list(part.split([each.numel() for each in pieces])))

    def _room(self, number: int, pieces: list[Tensor] | None) -> Tensor:
        """Where a section is decoded whose means go to several tensors: these, or one vector."""
        plan = self._parts[number][1]
        if plan.in_pieces and not self.variable:
            return cast(Tensor, pieces)
        return scratch("section mean", plan.layout.numel, torch.float32, self._device)

    def _starts_of(self, messages: Tensor) -> list[list[int]]:
        """Where each section of each message begins, whose lengths vary, and the last one ends."""
        words = messages[:, LENGTHS : LENGTHS + LENGTH * len(self._parts)].contiguous().view(torch.int64)
        ends = []
        for row in words.view(len(messages), len(self._parts)).tolist():
            end = [self._header]
            for length, (_, plan) in zip(row, self._parts, strict=True):
                if not 0 <= length <= plan.message_size or end[-1] + length > messages.shape[1]:
                    raise ValueError(f"a message says that a section takes {length} bytes; it is damaged")
                end.append(end[-1] + aligned(length))
            ends.append(end)
        return ends

    def flags(self, messages: Tensor) -> Tensor:
        """Sum of the flags of ``messages``, uint8 ``[M, size]``: a float32 scalar, 0.0 or NaN whatever the bytes."""
        return self._flags(messages).sum() * 0.0

    def refuses(self, message: Tensor) -> bool:
        """Whether ``message``, uint8 ``[size]``, is of a rank that could not read its own; waits for the device."""
        return bool(self._flags(message[None]).isinf())

    def _flags(self, messages: Tensor) -> Tensor:
        return messages[:, :ALIGNMENT].contiguous().view(self._flag_dtype)[:, 0].float()

    def settle(self, vector: Tensor, flag: Tensor) -> None:
        """Settle each section of a vector of sums, see the function."""
        for span, _ in self._parts:
            settle(vector[span], flag)


def settle(vector: Tensor, flag: Tensor) -> None:
    """Make a sum that is not finite, which cannot be encoded, zeros and a NaN in the flag.

    Args:
        vector: float32.
        flag: float32 scalar.
    """
    if len(vector):
        lowest, highest = torch.aminmax(vector)
        sound = lowest * 0.0 + highest * 0.0
        flag.add_(sound)
        if vector.device.type != "cpu":  # which is not waited for
            vector.masked_fill_(sound.isnan(), 0.0)
        elif sound.isnan():
            vector.zero_()


def _own(key: int, number: int) -> int:
    """A section's key: were it equal for all, sections would round alike, element by element.

    Below 0, since exchanges mix in ranks and parts, which are not.
    """
    return mix(key, -number) if number else key
