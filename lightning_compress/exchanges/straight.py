"""Averages of what is sent as it is, or cast, from the gradients' own memory and back, with no vector in between."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_compress.codecs import Codec, Dense
from lightning_compress.codecs.base import ALIGNMENT, aligned
from lightning_compress.collectives import Collective, World
from lightning_compress.core.buffers import Messages, chunk_size
from lightning_compress.exchanges.message import Section

Piece = tuple[int, int, int]
"""Of which tensor, from which element on, up to which."""


class Straight:
    """The same messages, and to the bit the same means, as those of an all-reduce of sections that are not encoded.

    Args:
        parts: sections that share a message, of each message; together they cover the vector.
        messages: one of each part, uint8, a header of ``ALIGNMENT`` bytes that begins with the flag.
        world: the ranks.
    """

    def __init__(self, parts: Sequence[Sequence[Section]], messages: Sequence[Messages], world: World) -> None:
        self._collective, _, self._meter = world
        self._parts = list(zip(parts, messages, strict=True))
        self._dtype = parts[0][0].codec.sum_dtype or torch.float32
        self._cuts: list[tuple[Tensor, list[Tensor], list[Piece]]] = []

    @property
    def dense(self) -> bool:
        """Whether nothing is cast."""
        return all(isinstance(section.codec, Dense) for sections, _ in self._parts for section in sections)

    def is_own(self, dtype: torch.dtype) -> bool:
        """Whether gradients of this dtype are sent as they are, as ``average_in_place`` does."""
        return self.dense or self._dtype == dtype

    @classmethod
    def of(cls, parts: Sequence[Sequence[Section]], messages: Sequence[Messages], world: World) -> Straight | None:
        """None where something is encoded or kept, or the sections leave a part of the vector out."""
        sections = sorted((section for part in parts for section in part), key=lambda section: section.start)
        together = all(before.stop == after.start for before, after in pairwise(sections))
        plain = all(each.codec.casts and not (each.fed_back and _loses(each.codec)) for each in sections)
        alike = len({each.codec.sum_dtype for each in sections}) == 1
        whole = together and bool(sections) and sections[0].start == 0
        return cls(parts, messages, world) if whole and plain and alike else None

    def mean(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        """Replace the gradients by their mean over the ranks.

        Args:
            gradients: float32, one-dimensional, of all that the vector consists of, in its order; within the limits of
                what they are cast to.
            flag: float32 scalar, 0.0 or NaN; gets the sum over the ranks.
        """
        self._cuts = self._cuts or self._cut([each.numel() for each in gradients])
        begun, weight = [], 1 / self._collective.size
        for message, rows, pieces in self._cuts:
            given = [gradients[index][start:stop] for index, start, stop in pieces]
            with self._meter.span("encode"):
                message[:1].copy_(flag)
                torch._foreach_copy_(rows, given)
            if self._meter.sampling:
                self._note_error(rows, given)
            begun.append(self._collective.begin_all_reduce(message))
        flag.zero_()
        for (message, rows, pieces), wait in zip(self._cuts, begun, strict=True):
            wait()
            with self._meter.span("decode"):
                flag.add_(message[0].float() * 0.0)
                outs = [gradients[index][start:stop] for index, start, stop in pieces]
                (_scale_each if message.is_cpu else _scale_all)(outs, rows, weight)

    def _note_error(self, rows: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """What casting lost."""
        lost = [part - row for part, row in zip(given, rows, strict=True)]
        before, after = (torch.stack(torch._foreach_norm(each)).norm() for each in (list(given), lost))
        self._meter.add_error(before, after)

    def _cut(self, sizes: Sequence[int]) -> list[tuple[Tensor, list[Tensor], list[Piece]]]:
        """Each message as numbers, and the parts of it, each with the piece of a gradient that it is."""
        ends = list(accumulate(sizes))
        cuts = []
        for sections, messages in self._parts:
            message = messages.all[0]
            numbers, rows, found = message.view(self._dtype), [], []
            start, width = ALIGNMENT, numbers.element_size()
            for section in sections:
                pieces = _pieces(section.start, section.stop, ends, chunk_size(message.device))
                row = numbers[start // width : start // width + section.layout.numel]
                rows += row.split([last - first for _, first, last in pieces])
                found += pieces
                start += aligned(width * section.layout.numel)
            cuts.append((numbers, rows, found))
        return cuts


def _scale_each(outs: Sequence[Tensor], rows: Sequence[Tensor], weight: float) -> None:
    """Multiply one piece after the other, while it is in the cache."""
    for out, row in zip(outs, rows, strict=True):
        if row.dtype == out.dtype:
            torch.mul(row, weight, out=out)
        else:
            out.copy_(row).mul_(weight)


def _scale_all(outs: Sequence[Tensor], rows: Sequence[Tensor], weight: float) -> None:
    """The same in a few launches for all pieces."""
    torch._foreach_copy_(list(outs), list(rows))
    torch._foreach_mul_(list(outs), weight)


def average_in_place(gradients: Sequence[Tensor], collective: Collective) -> Tensor:
    """What DistributedDataParallel does: divide, then add up, in the gradients' own dtype and memory.

    Args:
        gradients: one-dimensional, contiguous, of one dtype; each becomes its mean over the ranks. Those of a bucket
            stand side by side in memory, and travel from there.
        collective: the ranks.

    Returns:
        float32 scalar: 0.0, or NaN where a mean is not finite; the same on all ranks.
    """
    flat = side_by_side(gradients)
    whole = torch.cat(list(gradients)) if flat is None else flat
    collective.all_reduce(whole.div_(collective.size))
    if flat is None:
        torch._foreach_copy_(list(gradients), list(whole.split([each.numel() for each in gradients])))
    lowest, highest = torch.aminmax(whole)
    return (lowest.float() * 0.0 + highest.float() * 0.0).float()


def side_by_side(gradients: Sequence[Tensor]) -> Tensor | None:
    """One tensor of them all, if they follow one another in memory, in whatever order."""
    parts = sorted(gradients, key=lambda each: each.data_ptr())
    first = parts[0]
    together = all(one.data_ptr() + one.nbytes == two.data_ptr() for one, two in pairwise(parts))
    shared = all(each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for each in parts)
    if not together or not shared:
        return None
    return first.as_strided((sum(each.numel() for each in parts),), (1,))


def _loses(codec: Codec) -> bool:
    return not isinstance(codec, Dense) and codec.sum_dtype != torch.float32


def _pieces(start: int, stop: int, ends: Sequence[int], most: int) -> list[Piece]:
    """What of tensors that end at ``ends`` makes up ``[start, stop)`` of them all, at most so many elements each."""
    pieces = []
    while start < stop:
        index = bisect_right(ends, start)
        begin = ends[index - 1] if index else 0
        last = min(stop, ends[index], start + most)
        pieces.append((index, start - begin, last - begin))
        start = last
    return pieces
