"""Averages of what is sent as it is, from the gradients' own memory and back, with no vector in between."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_compress.codecs import Dense
from lightning_compress.codecs.base import ALIGNMENT, aligned
from lightning_compress.collectives import Collective
from lightning_compress.message import Section

Piece = tuple[int, int, int]
"""Of which tensor, from which element on, up to which."""


class Straight:
    """The same messages, and to the bit the same means, as those of an all-reduce of dense sections.

    Args:
        parts: sections that share a message, of each message; together they cover the vector.
        messages: uint8, of each part, a header of ``ALIGNMENT`` bytes that begins with the flag.
        collective: the ranks.
    """

    def __init__(self, parts: Sequence[Sequence[Section]], messages: Sequence[Tensor], collective: Collective) -> None:
        self._collective = collective
        self._parts = list(zip(parts, messages, strict=True))
        self._cuts: list[tuple[Tensor, list[tuple[Tensor, list[Piece]]]]] = []

    @classmethod
    def of(
        cls, parts: Sequence[Sequence[Section]], messages: Sequence[Tensor], collective: Collective
    ) -> Straight | None:
        """None where something is encoded, or the sections leave a part of the vector out."""
        sections = sorted((section for part in parts for section in part), key=lambda section: section.start)
        together = all(before.stop == after.start for before, after in pairwise(sections))
        plain = all(type(section.codec) is Dense for section in sections)
        whole = together and bool(sections) and sections[0].start == 0
        return cls(parts, messages, collective) if whole and plain else None

    def mean(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        """Replace the gradients by their mean over the ranks.

        Args:
            gradients: float32, one-dimensional, of all that the vector consists of, in its order.
            flag: float32 scalar, 0.0 or NaN; gets the sum over the ranks.
        """
        self._cuts = self._cuts or self._cut([each.numel() for each in gradients])
        begun, weight = [], 1 / self._collective.size
        for message, rows in self._cuts:
            message[:1].copy_(flag)
            for row, pieces in rows:
                torch.cat([gradients[place][start:stop] for place, start, stop in pieces], out=row)
            begun.append(self._collective.begin_all_reduce(message))
        flag.zero_()
        for (message, rows), wait in zip(self._cuts, begun, strict=True):
            wait()
            flag.add_(message[0] * 0.0)
            for row, pieces in rows:
                outs = [gradients[place][start:stop] for place, start, stop in pieces]
                for out, mean in zip(outs, row.split([out.numel() for out in outs]), strict=True):
                    torch.mul(mean, weight, out=out)

    def _cut(self, sizes: Sequence[int]) -> list[tuple[Tensor, list[tuple[Tensor, list[Piece]]]]]:
        """Each message as float32, and the sections in it with the pieces of gradients that they consist of."""
        ends = list(accumulate(sizes))
        cuts = []
        for sections, message in self._parts:
            numbers, rows, start = message.view(torch.float32), [], ALIGNMENT // 4
            for section in sections:
                row = numbers[start : start + section.layout.numel]
                rows.append((row, _pieces(section.start, section.stop, ends)))
                start += aligned(4 * section.layout.numel) // 4
            cuts.append((numbers, rows))
        return cuts


def _pieces(start: int, stop: int, ends: Sequence[int]) -> list[Piece]:
    """What of tensors that end at ``ends`` makes up ``[start, stop)`` of them all."""
    pieces = []
    while start < stop:
        place = bisect_right(ends, start)
        begin = ends[place - 1] if place else 0
        last = min(stop, ends[place])
        pieces.append((place, start - begin, last - begin))
        start = last
    return pieces
