"""One message per group: a header, then one section per codec.

    | head: flag, lengths, bits | section | padding to 16 bytes | section | ...

See ``head.py`` for the head. If the length of any section varies, it holds the lengths of all sections, and each
section begins where the previous one ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_compress.codecs import Rotated
from lightning_compress.codecs.codec import ALIGNMENT, Codec, KernelPlan, Method, Plan, aligned
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix, permutation
from lightning_compress.core.source import Pieces, Source
from lightning_compress.core.workspace import scratch
from lightning_compress.exchanges.head import LENGTH, LENGTHS, Head, Marks
from lightning_compress.kernels import program

Out = Tensor | Pieces
"""Where a mean goes: float32 ``[numel]``, or pieces of memory."""
PRECISE = Rotated(bits=4)
"""Encodes sums of coarse biased methods where no residual corrects the error. It is unbiased, with a tenth of the noise
of signs."""
_SAMPLE = Layout.of([("matrix", (256, 256))])


@dataclass(frozen=True)
class Section:
    """The part of a vector, from ``start`` on, that one method compresses.

    Attributes:
        method: codec or reducer.
        layout: the segments of this part.
        start: its first element in the vector.
        fed_back: what encoding leaves in this part is kept as the local residual.
        number: index of the method in the rules; it names the reducer's state.
        precise: encode sums with ``PRECISE`` if that has more bits, because the section's own method is biased and
            would need a residual.
        unit: cut shards at multiples of this many elements; None: at the codec's blocks.
        marks: what ranks tell each other of unused parameters, where an exchange sends it with its messages.
    """

    method: Method
    layout: Layout
    start: int
    fed_back: bool = True
    number: int = 0
    precise: bool = False
    unit: int | None = None
    marks: Marks | None = None

    @property
    def codec(self) -> Codec:
        """The method, for a section whose method is a codec."""
        assert isinstance(self.method, Codec)
        return self.method

    def codec_of_sums(self, ranks: int) -> Codec:
        """Return the codec that encodes sums of ``ranks`` ranks' values."""
        if self.precise and ranks > 1 and _bits(self.codec) < _bits(PRECISE):
            return PRECISE
        return self.codec.refined(ranks)

    @property
    def stop(self) -> int:
        """One past the section's last element in the vector."""
        return self.start + self.layout.numel

    @property
    def span(self) -> slice:
        """The section's slice of the vector."""
        return slice(self.start, self.stop)

    def shard(self, index: int, count: int) -> Section:
        """Return one of ``count`` parts of nearly equal size, cut at the codec's block boundaries."""
        unit = self.unit or self.codec.block
        blocks = -(-self.layout.numel // unit)
        first, last = (min(blocks * position // count * unit, self.layout.numel) for position in (index, index + 1))
        return replace(self, layout=self.layout.cut(first, last), start=self.start + first)


def room_for(out: Out, pieces: bool = False) -> Tensor:
    """Return where to write a vector that goes to ``out``: there, or scratch memory, to be copied to its pieces after.

    Args:
        out: float32.
        pieces: who writes can write to pieces.
    """
    if pieces or isinstance(out, Tensor):
        return out  # type: ignore[return-value]  # who writes to pieces says so
    return scratch("one vector", len(out), torch.float32, torch.device("cpu"))


@cache
def _bits(codec: Codec) -> float:
    """Return bits per element of a large message."""
    return 8 * codec.plan(_SAMPLE, torch.device("meta")).message_size / _SAMPLE.numel


def codecs_of(sections: Sequence[Section]) -> list[Codec]:
    """Return every codec that may encode these sections or their sums, before ``Codec.refined``."""
    return [section.codec for section in sections] + [PRECISE] * any(section.precise for section in sections)


@dataclass(frozen=True)
class SumRun:
    """Bytes ``[start, stop)`` of a message that may be summed element by element as ``dtype``."""

    dtype: torch.dtype
    start: int
    stop: int


class Part(NamedTuple):
    """A section of a message that is not empty.

    Attributes:
        number: its place among all sections that were given.
        span: its slice of the vector.
        plan: encodes and decodes it.
        first: its first byte in a message, unless lengths vary.
        fed_back: what encoding leaves is kept.
    """

    number: int
    span: slice
    plan: Plan
    first: int
    fed_back: bool


class MessagePlan:
    """Encodes sections of a vector into one message, and decodes messages.

    Args:
        sections: sections whose methods are codecs. They may leave parts of the vector out.
        device: where vectors and messages are.
        meter: records encoding and decoding time.
        summands: how many messages are summed in the message's own dtype.
        marked: the sections' marks travel in the head, because ranks get messages as they were sent, not summed.

    Attributes:
        parts: its sections.
        size: bytes of a message; the maximum if lengths vary.
        expected_size: expected bytes of a message.
        variable: messages vary in length.
        correlated: ``correlate`` has an effect.
        draws_alike: ``share`` or ``correlate`` has an effect.
        sum_runs: which bytes to sum, and in which dtype; None if a section cannot be summed.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        device: torch.device,
        meter: Meter,
        summands: int = 1,
        marked: bool = False,
    ) -> None:
        self._meter = meter
        given = [(number, section) for number, section in enumerate(sections) if section.layout.numel]
        sections = [section for _, section in given]
        plans = [section.codec.plan(section.layout, device, summands) for section in sections]
        self.variable = any(plan.variable for plan in plans)
        self.head = _head_of(sections, device, len(plans) * self.variable, marked)
        first, *ends = accumulate((aligned(plan.message_size) for plan in plans), initial=self.head.size)
        self.size = ends[-1] if ends else first
        self.expected_size = first + sum(aligned(plan.expected_size) for plan in plans)
        self.parts = [
            Part(number, section.span, plan, start, section.fed_back)
            for (number, section), plan, start in zip(given, plans, [first, *ends][: len(plans)], strict=True)
        ]
        self._sharing = [(number, plan) for number, plan in enumerate(plans) if type(plan).share is not Plan.share]
        self._correlated = [(number, plans[number]) for number, each in enumerate(sections) if each.codec.correlated]
        self.correlated, self.draws_alike = bool(self._correlated), bool(self._correlated or self._sharing)
        self.sum_runs = self._find_sum_runs([section.codec.sum_dtype for section in sections])

    def _find_sum_runs(self, dtypes: Sequence[torch.dtype | None]) -> tuple[SumRun, ...] | None:
        runs: list[SumRun] = []
        for dtype, part in zip(dtypes, self.parts, strict=True):
            if dtype is None:
                return None
            end = part.first + aligned(part.plan.message_size)
            if runs and runs[-1].dtype == dtype:
                runs[-1] = SumRun(dtype, runs[-1].start, end)
            else:
                runs.append(SumRun(dtype, part.first if runs else 0, end))
        return tuple(runs) or (SumRun(torch.float32, 0, ALIGNMENT),)

    @property
    def spans(self) -> list[slice]:
        """The sections' slices of the vector."""
        return [part.span for part in self.parts]

    def share(self, key: int) -> None:
        """Draw the random values that all ranks share.

        Call it before ``encode`` and ``decode``, with the same key on all ranks.
        """
        for number, plan in self._sharing:
            plan.share(_section_key(key, number))

    def correlate(self, key: int, place: int, places: int) -> None:
        """Make this rank's rounding errors cancel those of other ranks; see ``Plan.correlate``.

        Call it before ``encode``. It changes only codecs with ``correlated=True``. Do not use it where sums of messages
        are encoded again: the sums were rounded with the same random bits, so rounding them would be biased.

        Args:
            key: the random key, equal on all ranks.
            place: this rank's position among ``places`` ranks.
            places: how many ranks take part in the mean.
        """
        for number, plan in self._correlated:
            plan.correlate(_section_key(key, number), place, places)

    def agree(self, key: int, rank: int, size: int) -> None:
        """Call ``share``, and ``correlate`` over all ranks in a random order."""
        self.share(key)
        if self.correlated:
            self.correlate(key, permutation(key, size)[rank], size)

    def encode(
        self,
        vector: Tensor,
        message: Tensor,
        key: int,
        flag: Tensor,
        keep: bool = True,
        source: Source | None = None,
        late: bool = False,
    ) -> int:
        """Encode the sections into ``message``. ``vector`` keeps what was not encoded.

        Args:
            vector: float32, the whole group's.
            message: uint8 ``[size]``, whose padding the caller set to zero once.
            key: the random key; each section draws from its own stream.
            flag: float32 scalar, 0.0 or NaN.
            keep: the caller needs what encoding leaves even in sections without error feedback.
            source: what is encoded, if it is not in ``vector`` yet.
            late: ``head.read`` will not be called for what arrives.

        Returns:
            Bytes of the message to send.
        """
        source = Source(vector) if source is None else source
        kept = keep or all(part.fed_back for part in self.parts)
        original = source.into(vector).clone() if self._meter.sampling and not kept else None
        source = source if original is None else Source(vector)
        starts, end = [], self.size
        with self._meter.encode:
            for number, (_, span, plan, first, fed_back) in enumerate(self.parts):
                start = end if self.variable and number else first
                rest = vector[span] if keep or fed_back else None
                encode_section(plan, source.part(span), rest, message[start : start + plan.message_size], key, number)
                starts.append(start)
                if self.variable:
                    used = plan.used
                    end = start + aligned(used)
                    message[start + used : end] = 0  # clear the rest of an earlier, longer message
            self.head.write(message, flag, late)  # a source may find only now that it is not finite
            if self.variable:
                lengths = torch.tensor([part.plan.used for part in self.parts], dtype=torch.int64)
                message[LENGTHS : LENGTHS + LENGTH * len(lengths)].view(torch.int64).copy_(lengths)
        if original is not None:
            self._subtract_sent(original, vector, message, starts, keep)
        return end

    def _subtract_sent(self, original: Tensor, vector: Tensor, message: Tensor, starts: list[int], keep: bool) -> None:
        """Compute the encoding error of sections whose codec did not leave it, because this step measures it."""
        for (_, span, plan, _, fed_back), start in zip(self.parts, starts, strict=True):
            if not (keep or fed_back):
                vector[span] = original[span]
                plan.decode(message[None, start : start + plan.used], vector[span], -1.0, accumulate=True)

    def decode(self, messages: Tensor, out: Out, weight: float, accumulate: bool) -> None:
        """Write ``weight`` times the sum of ``messages`` to the sections of ``out``, or add it if ``accumulate``.

        Args:
            messages: uint8 ``[M, size]``. If lengths vary, as wide as the longest of them is enough.
            out: float32, the whole group's: one vector, or its pieces, if not ``accumulate``.
            weight: the factor.
            accumulate: add to ``out``.

        Raises:
            ValueError: messages are truncated or their lengths are invalid; see also ``Plan.decode``.
        """
        if messages.shape[1] < self.head.size or messages.shape[1] % ALIGNMENT:
            raise ValueError(
                f"messages of {messages.shape[1]} bytes are truncated; their header alone has {self.head.size}"
            )
        with self._meter.decode:
            rows = self._starts_of(messages) if self.variable else []
            for number, (_, span, plan, first, _) in enumerate(self.parts):
                starts, part = [row[number] for row in rows] if self.variable else [first], out[span]
                alike = len(set(starts)) <= 1  # always so if no earlier section varies
                vector = room_for(part, plan.in_pieces and alike)
                if alike:
                    start = starts[0] if starts else 0
                    plan.decode(messages[:, start : start + plan.message_size], vector, weight, accumulate)
                else:
                    for row, start in enumerate(starts):
                        message = messages[row : row + 1, start : start + plan.message_size]
                        plan.decode(message, vector, weight, accumulate or row > 0)
                if vector is not part:
                    part.copy_(vector)

    def _starts_of(self, messages: Tensor) -> list[list[int]]:
        """Return, for each message of variable length, where its sections begin and where the last one ends."""
        words = messages[:, LENGTHS : LENGTHS + LENGTH * len(self.parts)].contiguous().view(torch.int64)
        ends = []
        for row in words.view(len(messages), len(self.parts)).tolist():
            end = [self.head.size]
            for length, part in zip(row, self.parts, strict=True):
                if not 0 <= length <= part.plan.message_size or end[-1] + length > messages.shape[1]:
                    raise ValueError(f"a message is damaged: it claims a section of {length} bytes")
                end.append(end[-1] + aligned(length))
            ends.append(end)
        return ends

    def reports_error(self, message: Tensor) -> bool:
        """Return whether ``message``, uint8 ``[size]``, comes from a rank that could not read what it received.

        Waits for the device.
        """
        return bool(self.head.flags(message[None]).isinf())

    def zero_nonfinite(self, vector: Tensor, flag: Tensor) -> None:
        """Apply ``zero_nonfinite`` to each section of a vector of sums."""
        for span in self.spans:
            zero_nonfinite(vector[span], flag)


def _head_of(sections: Sequence[Section], device: torch.device, lengths: int, marked: bool) -> Head:
    marks = next((each.marks for each in sections), None) if marked else None
    rows = marks.of([each for section in sections for each in section.layout.segments]) if marks else ()
    sums = [section.codec.sum_dtype for section in sections]
    summed = sums[0] if sums and None not in sums and not marked else None
    return Head(lengths, summed or torch.float32, device, marks, rows)


def zero_nonfinite(vector: Tensor, flag: Tensor) -> None:
    """Replace a sum that is not finite by zeros, because it cannot be encoded, and set the flag to NaN.

    Args:
        vector: float32 sums; changed in place.
        flag: float32 scalar; changed in place.
    """
    if len(vector):
        lowest, highest = torch.aminmax(vector)
        finite = lowest * 0.0 + highest * 0.0  # 0.0 or NaN
        flag.add_(finite)
        if vector.device.type != "cpu":  # do not wait for the device
            vector.masked_fill_(finite.isnan(), 0.0)
        elif finite.isnan():
            vector.zero_()


def encode_section(plan: Plan, source: Source, rest: Tensor | None, message: Tensor, key: int, number: int) -> None:
    """Encode a section by its own random stream; see ``Plan.encode_from``. ``number`` is the section's."""
    if type(plan) is not KernelPlan and (tape := program.here.tape):
        tape.refuse("a codec does a part of its work without kernels")
    plan.encode_from(source, rest, message, _section_key(key, number) if number else key)


def _section_key(key: int, number: int) -> int:
    """Return a section's own key, so that sections do not round alike.

    It mixes in negative numbers, because exchanges mix in ranks and parts, which are 0 or more.
    """
    return mix(key, -number) if number else key
