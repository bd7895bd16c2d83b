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

import torch
from torch import Tensor

from lightning_compress.codecs import Rotated
from lightning_compress.codecs.base import ALIGNMENT, Codec, Method, aligned
from lightning_compress.core.layout import Layout
from lightning_compress.core.meter import Meter
from lightning_compress.core.random import mix, permutation
from lightning_compress.kernels import Summands

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
    """

    method: Method
    layout: Layout
    start: int
    fed_back: bool = True
    number: int = 0
    precise: bool = False

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
        blocks = -(-self.layout.numel // self.codec.block)
        first, last = (
            min(blocks * position // count * self.codec.block, self.layout.numel) for position in (index, index + 1)
        )
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
        sum_runs: what to sum, and how; None if some section cannot be summed.
    """

    def __init__(self, sections: Sequence[Section], device: torch.device, meter: Meter, summands: int = 1) -> None:
        self._meter = meter
        sections = [section for section in sections if section.layout.numel]
        plans = [section.codec.plan(section.layout, device, summands) for section in sections]
        self._parts = [(section.span, plan) for section, plan in zip(sections, plans, strict=True)]
        self._correlated = [section.codec.correlated for section in sections]
        self._fed_back = [section.fed_back for section in sections]
        self.variable = any(plan.variable for plan in plans)
        self._header = aligned(LENGTHS + LENGTH * len(plans)) if self.variable else ALIGNMENT
        self.size = self._header + sum(aligned(plan.message_size) for plan in plans)
        self.expected_size = self._header + sum(aligned(plan.expected_size) for plan in plans)
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
        for number, (_, plan) in enumerate(self._parts):
            plan.share(_own(key, number))

    @property
    def correlated(self) -> bool:
        """Whether ``correlate`` has an effect."""
        return any(self._correlated)

    def correlate(self, key: int, place: int, places: int) -> None:
        """Have errors cancel those of other ranks' messages for the same mean; see ``Plan.correlate``.

        For codecs that do so, before ``encode``. Never where sums of messages are encoded: these were rounded by the
        same random bits, and a number that depends on them is not rounded right on average.
        """
        for number, ((_, plan), correlated) in enumerate(zip(self._parts, self._correlated, strict=True)):
            if correlated:
                plan.correlate(_own(key, number), place, places)

    def correlate_all(self, key: int, rank: int, size: int) -> None:
        """``correlate`` over all ranks, in an order that is drawn."""
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
        with self._meter.span("encode"):
            message[:ALIGNMENT].view(self._flag_dtype)[:1].copy_(flag)
            for number, (span, plan) in enumerate(self._parts):
                part, own = message[end : end + plan.message_size], _own(key, number)
                if summands is not None:
                    plan.encode_sum(summands[0][span], summands[1][span], vector[span], part, own)
                else:
                    (plan.encode if keeps[number] else plan.send)(vector[span], part, own)
                if self.variable:  # what an earlier, longer message left there
                    message[end + plan.used : end + aligned(plan.used)] = 0
                starts.append(end)
                end += aligned(plan.used)
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

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Write ``weight`` times the sum of ``messages``, uint8 ``[M, size]``, into the sections of ``out``.

        Messages of variable length need be no longer than the longest of them.

        Raises:
            ValueError: messages are too short, lengths in one are not its own, or see ``Plan.decode``.
        """
        if messages.shape[1] < self._header or messages.shape[1] % ALIGNMENT:
            raise ValueError(f"messages of {messages.shape[1]} bytes are truncated; their header has {self._header}")
        with self._meter.span("decode"):
            ends = self._ends(messages)
            for number, (span, plan) in enumerate(self._parts):
                starts = [row[number] for row in ends]
                part = out[span]
                if len(set(starts)) <= 1:  # as always where no earlier section varies
                    start = starts[0] if starts else 0
                    plan.decode(messages[:, start : start + plan.message_size], part, weight, accumulate)
                    continue
                for row, start in enumerate(starts):
                    message = messages[row : row + 1, start : start + plan.message_size]
                    plan.decode(message, part, weight, accumulate or row > 0)

    @property
    def in_pieces(self) -> bool:
        """``decode_pieces`` may be called."""
        return all(plan.in_pieces for _, plan in self._parts) and not self.variable

    def decode_pieces(self, messages: Tensor, outs: Sequence[Tensor], weight: float) -> None:
        """``decode`` into a tensor for each segment that is not empty, in order, in place of one vector."""
        with self._meter.span("decode"):
            start, number = self._header, 0
            for _, plan in self._parts:
                count = sum(segment.numel > 0 for segment in plan.layout.segments)
                message = messages[:, start : start + plan.message_size]
                plan.decode_pieces(message, outs[number : number + count], weight)
                start, number = start + aligned(plan.message_size), number + count

    def _ends(self, messages: Tensor) -> list[list[int]]:
        """Where each section of each message begins, and the last one ends."""
        if not self.variable:
            lengths = [[plan.message_size for _, plan in self._parts]] * len(messages)
        else:
            words = messages[:, LENGTHS : LENGTHS + LENGTH * len(self._parts)].contiguous().view(torch.int64)
            lengths = words.view(len(messages), len(self._parts)).tolist()
        ends = []
        for row in lengths:
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
