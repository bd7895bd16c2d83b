"""1-bit SGD by the column: two reconstruction values for the weights that feed one unit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.base import Plan, aligned
from lightning_compress.codecs.packing.bits import pack, packed_size, unpack
from lightning_compress.core.buffers import chunk_size, pieces, scratch
from lightning_compress.core.layout import Layout, Segment


def columns(segment: Segment, min_column: int) -> list[tuple[int, int]]:
    """Where a segment's columns are: runs of ``(how many, elements of each)`` that fill it, in order.

    A column is a row of the parameter as ``[out, rest]``, or as many rows as reach ``min_column`` elements. What a
    segment has of a column that was cut is a column too, and so are the rows that are left over at the end.
    """
    units = segment.shape[0] if segment.shape else 1
    width = max(1, _numel(segment.shape) // max(1, units))
    length = -(-min_column // width) * width
    head = min(-segment.start % length, segment.numel)
    whole, tail = divmod(segment.numel - head, length)
    return [run for run in ((1, head), (whole, length), (1, tail)) if run[0] and run[1]]


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class ColumnPlan(Plan):
    """``v >= 0`` as one bit, and the mean of either side for each column; see ``OneBit``.

    A message is every column's mean of the elements ``>= 0``, then every column's other mean as float32, zeros up to a
    multiple of 16 bytes, then the bits, the first one lowest.

    Args:
        layout: what the vector is made of.
        device: where it is.
        min_column: elements that a column has at least; shorter ones are joined.
    """

    def __init__(self, layout: Layout, device: torch.device, min_column: int) -> None:
        super().__init__(layout)
        self._chunk = chunk_size(device)
        self._pieces: list[tuple[slice, slice, tuple[int, int]]] = []  # columns, elements, shape
        column = element = 0
        for segment in layout.segments:
            for count, length in columns(segment, min_column):
                for part in pieces(count, max(1, self._chunk // length)):
                    rows = part.stop - part.start
                    ends = column + rows, element + rows * length
                    self._pieces.append((slice(column, ends[0]), slice(element, ends[1]), (rows, length)))
                    column, element = ends
        self._header = 8 * column
        self._bits = aligned(self._header)
        self.message_size = self._bits + packed_size(layout.numel)
        longest = max((part.stop - part.start for _, part, _ in self._pieces), default=0)
        most = max((rows for _, _, (rows, _) in self._pieces), default=0)
        self._values = torch.empty(2, column, device=device)
        self._marks = scratch("column marks", min(self._chunk, layout.numel), torch.bool, device)
        self._floats = scratch("column floats", longest + 16, torch.float32, device)
        self._wide = scratch("column wide", longest, torch.float64, device)
        self._sums = scratch("column sums", 2 * most, torch.float64, device)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """Move content from the vector into the message; see the base class."""
        self.check(vector, message)
        for piece in pieces(self.layout.numel, self._chunk):  # bytes do not end where columns do
            marks = self._marks[: piece.stop - piece.start]
            if vector.device.type == "cpu":  # three times as fast as torch.ge into booleans
                np.greater_equal(vector[piece].numpy(), 0, out=marks.numpy())
            else:
                torch.ge(vector[piece], 0, out=marks)
            pack(marks, message[self._bits + piece.start // 8 : self._bits + packed_size(piece.stop)])
        for own, part, shape in self._pieces:
            self._subtract(vector[part].view(shape), self._values[:, own])
        message[: self._header] = self._values.view(torch.uint8).view(-1)
        message[self._header : self._bits] = 0

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Write the weighted sum of the messages; see the base class."""
        self.check(out, messages)
        header = messages[:, : self._header].clone(memory_format=torch.contiguous_format).view(-1)
        values = header.view(torch.float32).view(len(messages), *self._values.shape, 1).mul_(weight)
        for own, part, shape in self._pieces:
            rows = out[part].view(shape)
            if not accumulate:
                rows.zero_()
            for message, (high, low) in zip(messages, values[:, :, own], strict=True):
                signs = self._signs(message, part).view(shape)
                rows.addcmul_(signs, high)
                rows.addcmul_(signs.sub_(1), low, value=-1)

    def _subtract(self, rows: Tensor, means: Tensor) -> None:
        """Write the means of either side of each row, summed in float64, and take them off the row."""
        count, length = rows.shape
        wide = self._wide[: rows.numel()].view(rows.shape)
        sums = self._sums[: 2 * count].view(2, count)
        torch.sum(wide.copy_(rows).clamp_(min=0), dim=1, out=sums[0])
        torch.sum(wide.copy_(rows).clamp_(max=0), dim=1, out=sums[1])
        signs = torch.ge(rows, 0, out=self._floats[: rows.numel()].view(rows.shape))
        ones = signs if length <= 1 << 24 else wide.copy_(signs)  # float32 counts no further
        upper = ones.sum(dim=1).double()
        means.copy_(sums.div_(torch.stack([upper, length - upper]).clamp_(min=1)))
        high, low = means.unsqueeze(2)
        rows.addcmul_(signs, high, value=-1)  # each element is rounded once: the other product is 0
        rows.addcmul_(signs.sub_(1), low)

    def _signs(self, message: Tensor, part: slice) -> Tensor:
        """1.0 where the message has a bit of these elements and 0.0 elsewhere; in scratch."""
        first = part.start // 8
        packed = message[self._bits + first : self._bits + packed_size(part.stop)]
        unpack(packed, self._floats[: 8 * len(packed)])
        return self._floats[part.start - 8 * first : part.stop - 8 * first]
