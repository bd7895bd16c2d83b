"""Let the transport sum the messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from types import ModuleType

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs import Codec, Dense
from lightning_compress.codecs.codec import ALIGNMENT, aligned
from lightning_compress.collectives import Collective, World
from lightning_compress.collectives.counting import all_reduce_bytes, all_reduce_rounds
from lightning_compress.core.random import mix
from lightning_compress.core.source import adjacent
from lightning_compress.core.state import States
from lightning_compress.core.workspace import Messages, chunk_size
from lightning_compress.exchanges.exchange import Cost, Exchange, ExchangePlan
from lightning_compress.exchanges.message import MessagePlan, Section
from lightning_compress.exchanges.parts import part_count, parts_of

Piece = tuple[int, int, int]
"""A stretch of a gradient: the gradient's index, the first element, and one past the last."""


@dataclass(frozen=True)
class AllReduce(Exchange):
    """One all-reduce per dtype in the message; a rank sends ``2 (W - 1) / W`` messages.

    Only for methods whose messages may be summed (``Codec.sum_dtype``). The transport's additions round too, and
    no residual gets that error. So for a cast, only the local half of the conservation law holds.
    """

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        if codec.sum_dtype is None:
            raise ValueError(
                f"exchange='all_reduce' sums messages, and those of {codec} cannot be summed; "
                "use exchange='auto', 'all_gather' or 'two_shot'"
            )

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        collective, device, meter = world
        size = sum(each.layout.numel * (each.codec.sum_dtype or torch.float32).itemsize for each in sections)
        parts = parts_of(sections, part_count(sections, size, world))
        messages = [MessagePlan(part, device, meter, summands=collective.size) for part in parts]
        plan = _Plan(messages, collective, device)
        plan.dense_spans = [each.span for each in sections if isinstance(each.codec, Dense)]
        plan.in_place = InPlace.of(parts, plan.messages, world)
        return plan


class _Plan(ExchangePlan):
    description = "all_reduce"

    def __init__(self, plans: Sequence[MessagePlan], collective: Collective, device: torch.device) -> None:
        self._collective = collective
        self._plans = [(plan, plan.sum_runs or ()) for plan in plans]
        self.messages = [Messages(1, plan.size, device) for plan in plans]
        runs = [run for _, runs in self._plans for run in runs]
        self.cost = Cost(
            bytes_sent=sum(all_reduce_bytes(run.stop - run.start, collective.size) for run in runs),
            rounds=len(self._plans[0][1]) * all_reduce_rounds(collective.size),  # parts share the wire
            encodes=1.0,
            decodes=1.0,
            calls=len(plans),
            parts=len(plans),
        )

    @cached_property
    def _parts(self) -> list[tuple[MessagePlan, Tensor, list[Tensor]]]:
        """Each part's plan, its message, and views of what is summed."""
        parts = []
        for (plan, runs), messages in zip(self._plans, self.messages, strict=True):
            sums = [messages.all[0, run.start : run.stop].view(run.dtype) for run in runs]
            parts.append((plan, messages.all, sums))
        return parts

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        rank, size = self._collective.rank, self._collective.size
        waits = []
        for number, (plan, message, sums) in enumerate(self._parts):
            part_key = mix(key, number) if number else key
            plan.share(part_key)
            plan.encode(vector, message[0], mix(part_key, rank), flag)
            waits.append([self._collective.begin("all_reduce", values) for values in sums])
        flag.zero_()
        for (plan, message, _), begun in zip(self._parts, waits, strict=True):
            for wait in begun:
                wait()
            plan.head.read(message, flag)
            plan.decode(message, out, 1 / size, accumulate=False)


class InPlace:
    """Averages gradients that are only cast, without a vector: messages and means are bit-identical to ``_Plan``'s.

    Args:
        parts: the sections of each message; together they cover the vector.
        messages: one message per part, uint8, with a header of ``ALIGNMENT`` bytes that begins with the flag.
        world: the ranks.
    """

    def __init__(self, parts: Sequence[Sequence[Section]], messages: Sequence[Messages], world: World) -> None:
        self._collective, device, self._meter = world
        self._parts = list(zip(parts, messages, strict=True))
        self._dtype = parts[0][0].codec.sum_dtype or torch.float32
        self._limit = parts[0][0].codec.limit(self._collective.size)
        self._cuts: list[tuple[Tensor, list[Tensor], list[Piece]]] = []
        self._fused = kernels.backend(__name__, device, "triton")
        self._tiles: dict[tuple[int, ...] | None, tuple[Tensor, bool]] = {}
        self._arrived: Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[Sequence[Section]], messages: Sequence[Messages], world: World) -> InPlace | None:
        """Return None unless all sections are casts to one dtype, lose nothing to a residual, and cover the vector."""
        sections = sorted((section for part in parts for section in part), key=lambda section: section.start)
        side_by_side = all(before.stop == after.start for before, after in pairwise(sections))
        only_cast = all(each.codec.is_cast and not (each.fed_back and _loses(each.codec)) for each in sections)
        one_dtype = len({each.codec.sum_dtype for each in sections}) == 1
        whole = side_by_side and bool(sections) and sections[0].start == 0
        one_message = len(parts) == 1 or kernels.compiler(world.device) != "triton"
        return cls(parts, messages, world) if whole and only_cast and one_dtype and one_message else None

    def mean(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        """See ``AveragesInPlace``."""
        self._cuts = self._cuts or self._cut([each.numel() for each in gradients])
        if self._fused:
            self._mean_in_few_launches(self._fused, gradients, flag)
            return
        begun, weight = [], 1 / self._collective.size
        for message, rows, pieces in self._cuts:
            parts = [gradients[index][start:stop] for index, start, stop in pieces]
            with self._meter.encode:
                message[:1].copy_(flag)
                torch._foreach_copy_(rows, parts)
            if self._meter.sampling:
                self._note_error(rows, parts)
            begun.append(self._collective.begin("all_reduce", message))
        flag.zero_()
        for (message, rows, pieces), wait in zip(self._cuts, begun, strict=True):
            wait()
            with self._meter.decode:
                flag.add_(message[0].float() * 0.0)
                outs = [gradients[index][start:stop] for index, start, stop in pieces]
                (_scale_each if message.is_cpu else _scale_all)(outs, rows, weight)

    def _mean_in_few_launches(self, fused: ModuleType, gradients: Sequence[Tensor], flag: Tensor) -> None:
        """Do the same on an accelerator. There values may be out of range, or not finite: then all means are NaN."""
        ((message, rows, pieces),) = self._cuts
        bucket = adjacent(gradients)
        copy = None if bucket else torch.cat(list(gradients))
        first, places = (copy, None) if bucket is None else (bucket.first, bucket.places)
        if places not in self._tiles:
            starts = places or tuple(accumulate((each.numel() for each in gradients), initial=0))
            stretches = [
                (starts[index] + start, row.storage_offset() - message.storage_offset(), stop - start)
                for row, (index, start, stop) in zip(rows, pieces, strict=True)
            ]
            self._tiles[places] = fused.table(stretches, message.device)
        tiles = self._tiles[places]
        if self._arrived is None:
            self._arrived = torch.zeros(1, dtype=torch.int32, device=message.device)
        with self._meter.encode:
            fused.encode(first, tiles, message, self._limit, flag, self._arrived)
        if self._meter.sampling:
            self._note_error(rows, [gradients[index][start:stop] for index, start, stop in pieces])
        self._collective.begin("all_reduce", message)()
        with self._meter.decode:
            fused.decode(message, tiles, first, 1 / self._collective.size, flag)
        if copy is not None:
            torch._foreach_copy_(list(gradients), list(copy.split([each.numel() for each in gradients])))

    def _note_error(self, rows: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Record what casting lost."""
        lost = [part - row for part, row in zip(parts, rows, strict=True)]
        before, after = (torch.stack(torch._foreach_norm(tensors)).norm() for tensors in (list(parts), lost))
        self._meter.add_error(before, after)

    def _cut(self, sizes: Sequence[int]) -> list[tuple[Tensor, list[Tensor], list[Piece]]]:
        """Return each message as numbers, its rows, and the piece of a gradient that each row holds."""
        ends = list(accumulate(sizes))
        cuts = []
        for sections, messages in self._parts:
            message = messages.all[0]
            numbers, rows, row_pieces = message.view(self._dtype), [], []
            start, width = ALIGNMENT, numbers.element_size()
            for section in sections:
                pieces = _pieces(section.start, section.stop, ends, chunk_size(message.device))
                row = numbers[start // width : start // width + section.layout.numel]
                rows += row.split([last - first for _, first, last in pieces])
                row_pieces += pieces
                start += aligned(width * section.layout.numel)
            cuts.append((numbers, rows, row_pieces))
        return cuts


def average_in_place(gradients: Sequence[Tensor], collective: Collective) -> Tensor:
    """Average gradients as DistributedDataParallel does: divide, then sum, in their own dtype and memory.

    Args:
        gradients: one-dimensional, contiguous, of one dtype; each becomes its mean over the ranks. If they are
            neighbours in memory, as in a bucket, they are sent from there without a copy.
        collective: the ranks.

    Returns:
        float32 scalar: 0.0, or NaN if a mean is not finite; the same on all ranks.
    """
    flat = adjacent(gradients)
    whole = flat.whole() if flat else torch.cat(list(gradients))
    collective.all_reduce(whole.div_(collective.size))
    if flat is None:
        torch._foreach_copy_(list(gradients), list(whole.split([each.numel() for each in gradients])))
    lowest, highest = torch.aminmax(whole)
    return (lowest.float() * 0.0 + highest.float() * 0.0).float()


def extremes(gradients: Sequence[Tensor]) -> Tensor:
    """Return the minimum and maximum of each gradient, or of all together; NaN if one is NaN."""
    if not gradients[0].is_cpu and (flat := adjacent(gradients)):  # a launch costs more than a pass
        gradients = [flat.whole()]
    return torch.cat([torch.stack(torch.aminmax(each)) for each in gradients])


def _scale_each(outs: Sequence[Tensor], rows: Sequence[Tensor], weight: float) -> None:
    """Multiply piece by piece, while each is in the cache."""
    for out, row in zip(outs, rows, strict=True):
        if row.dtype == out.dtype:
            torch.mul(row, weight, out=out)
        else:
            out.copy_(row).mul_(weight)


def _scale_all(outs: Sequence[Tensor], rows: Sequence[Tensor], weight: float) -> None:
    """Do the same for all pieces in few kernel launches."""
    torch._foreach_copy_(list(outs), list(rows))
    torch._foreach_mul_(list(outs), weight)


def _loses(codec: Codec) -> bool:
    return not isinstance(codec, Dense) and codec.sum_dtype != torch.float32


def _pieces(start: int, stop: int, ends: Sequence[int], most: int) -> list[Piece]:
    """Cut ``[start, stop)`` of concatenated tensors into pieces of single tensors.

    Args:
        start: first element.
        stop: one past the last element.
        ends: where each tensor ends.
        most: the maximum number of elements per piece.
    """
    pieces = []
    while start < stop:
        index = bisect_right(ends, start)
        begin = ends[index - 1] if index else 0
        last = min(stop, ends[index], start + most)
        pieces.append((index, start - begin, last - begin))
        start = last
    return pieces
