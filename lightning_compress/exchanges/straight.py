"""Averages of what is sent as it is, or cast, from the gradients' own memory and back, with no vector in between."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.codecs.base import ALIGNMENT, aligned
from lightning_compress.codecs.buffers import chunk_size
from lightning_compress.collectives import Collective
from lightning_compress.exchanges.buffers import Messages
from lightning_compress.message import Section

Piece = tuple[int, int, int]
"""Of which tensor, from which element on, up to which."""


class Straight:
    """The same messages, and to the bit the same means, as those of an all-reduce of sections that nobody encodes.

    Args:
        parts: sections that share a message, of each message; together they cover the vector.
        messages: one of each part, uint8, a header of ``ALIGNMENT`` bytes that begins with the flag.
        collective: the ranks.
    """

    def __init__(
        self, parts: Sequence[Sequence[Section]], messages: Sequence[Messages], collective: Collective
    ) -> None:
        self._collective = collective
        self._parts = list(zip(parts, messages, strict=True))
        self._dtype = parts[0][0].codec.sum_dtype or torch.float32
        self._cuts: list[tuple[Tensor, list[Tensor], list[Piece]]] = []

    @classmethod
    def of(
        cls, parts: Sequence[Sequence[Section]], messages: Sequence[Messages], collective: Collective
    ) -> Straight | None:
        """None where something is encoded or kept, or the sections leave a part of the vector out."""
        sections = sorted((section for part in parts for section in part), key=lambda section: section.start)
        together = all(before.stop == after.start for before, after in pairwise(sections))
        plain = all(each.codec.casts and not (each.fed_back and _loses(each.codec)) for each in sections)
        alike = len({each.codec.sum_dtype for each in sections}) == 1
        whole = together and bool(sections) and sections[0].start == 0
        return cls(parts, messages, collective) if whole and plain and alike else None

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
            message[:1].copy_(flag)
            torch._foreach_copy_(rows, [gradients[place][start:stop] for place, start, stop in pieces])
            begun.append(self._collective.begin_all_reduce(message))
        flag.zero_()
        for (message, rows, pieces), wait in zip(self._cuts, begun, strict=True):
            wait()
            flag.add_(message[0].float() * 0.0)
            for row, (place, start, stop) in zip(rows, pieces, strict=True):
                out = gradients[place][start:stop]
                if row.dtype == out.dtype:
                    torch.mul(row, weight, out=out)
                else:
                    out.copy_(row).mul_(weight)

    def _cut(self, sizes: Sequence[int]) -> list[tuple[Tensor, list[Tensor], list[Piece]]]:
        """Each message as numbers, and the stretches of it, each with the piece of a gradient that it is."""
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


def _loses(codec: Codec) -> bool:
    return codec.sum_dtype != torch.float32


def _pieces(start: int, stop: int, ends: Sequence[int], most: int) -> list[Piece]:
    """What of tensors that end at ``ends`` makes up ``[start, stop)`` of them all, at most so many elements each."""
    pieces = []
    while start < stop:
        place = bisect_right(ends, start)
        begin = ends[place - 1] if place else 0
        last = min(stop, ends[place], start + most)
        pieces.append((place, start - begin, last - begin))
        start = last
    return pieces
