"""Rows that are not zero: what meProp leaves of a weight's gradient, with nothing lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, FusedPlan, Summands
from lightning_compress.codecs.packing.bits import pack, unpack
from lightning_compress.codecs.variable import VariablePlan, damaged
from lightning_compress.core.layout import Layout

HEADER = 8
"""Bytes of the number of rows and of how they are named."""
LIST, BITMAP, ALL = range(3)
"""How rows are named: by their numbers, by a bit for every row, or not at all, since all are there."""


@dataclass(frozen=True)
class Rows(Codec):
    """Send the rows that are not zero, exactly; there is no residual.

    A row belongs to one index of a parameter's first dimension: to one output of a Linear layer or a convolution, to
    one word of an embedding, to one element of a bias. A weight whose layer is trained by meProp (``backward=meprop``)
    has a gradient of few rows, and other ones on each rank: what arrives is their union. On other gradients it sends
    everything, and eight bytes.

    A message varies in length: the number of rows and a code as int32; then by the code, whichever takes fewest bytes,
    the rows' numbers as int32 (0), a bit for every row in whole words of 32 (1), or nothing, where all rows follow (2);
    then the rows as float32, one after the other. Rows are numbered through the vector; a shard that begins or ends
    inside of one has a part of it. On an accelerator the host waits for the number of rows.

    Args:
        density: share of the rows that are likely not to be zero, in (0, 1], by which ``exchange="auto"`` chooses;
            messages have any number.

    Raises:
        ValueError: ``density`` is not in (0, 1].

    Sun, Ren, Ma, Wang, "meProp: Sparsified Back Propagation for Accelerated Deep Learning with Reduced Overfitting",
    ICML 2017, arXiv 1706.06197 (whose gradients these are; it sends nothing).
    """

    name: ClassVar[str] = "rows"
    sparse: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    density: float = 0.1

    def __post_init__(self) -> None:
        given = self.density
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= 1:
            raise ValueError(f"Rows(density={given!r}): density must be in (0, 1]; 0.1 expects one row in ten")

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``."""
        return self.density

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> VariablePlan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        return _RowsPlan(layout, device, self.density)


@dataclass(frozen=True)
class _Block:
    """Rows ``[first, last)`` of the vector, of equal width, side by side from ``start`` on."""

    start: int
    width: int
    first: int
    last: int

    def of(self, vector: Tensor) -> Tensor:
        """These rows, ``[rows, width]``."""
        count = self.last - self.first
        return vector[self.start : self.start + count * self.width].view(count, self.width)


def _blocks(layout: Layout) -> Iterator[_Block]:
    """Rows of each segment: the end of one that is cut, whole ones, and the beginning of one that is cut."""
    first = 0
    for segment in layout.segments:
        width, place = max(1, math.prod(segment.shape[1:])), segment.offset
        before = min(-segment.start % width, segment.numel)
        whole, after = divmod(segment.numel - before, width)
        for count, length in ((1, before), (whole, width), (1, after)):
            if count and length:
                yield _Block(place, length, first, first + count)
                place, first = place + count * length, first + count


class _RowsPlan(FusedPlan, VariablePlan):
    def __init__(self, layout: Layout, device: torch.device, density: float) -> None:
        super().__init__(layout)
        self._blocks = list(_blocks(layout))
        self._rows = self._blocks[-1].last if self._blocks else 0
        self._bitmap = 4 * -(-self._rows // 32)
        self._flags = torch.zeros(8 * self._bitmap, dtype=torch.bool, device=device)  # of rows, and padding
        self.message_size = HEADER + 4 * layout.numel if layout.numel else 0
        likely = HEADER + density * (4 * layout.numel) + min(4 * density * self._rows, self._bitmap)
        self._expected = min(math.ceil(likely), self.message_size)

    def encode(self, vector: Tensor, message: Tensor, key: int, keep: bool = True, summands: Summands = None) -> None:
        """See ``Plan.encode``."""
        self.take(vector, message, summands)
        if not self._blocks:
            return
        counts = self._mark(vector)
        count = sum(counts)
        size = 4 * sum(found * block.width for found, block in zip(counts, self._blocks, strict=True))
        named = min(4 * count, self._bitmap)
        kind = ALL if named + size >= 4 * self.layout.numel else LIST if named == 4 * count else BITMAP
        message[:HEADER].view(torch.int32).copy_(torch.tensor([self._rows if kind == ALL else count, kind]))
        if kind == ALL:
            self._used = self.message_size
            message[HEADER:].view(torch.float32).copy_(vector)
            if keep:
                vector.zero_()
            return
        index = self._flags.nonzero().flatten()
        self._used = HEADER + named + size
        if kind == LIST:
            message[HEADER : HEADER + named].view(torch.int32).copy_(index)
        else:
            pack(self._flags, message[HEADER : HEADER + named])
        values = message[HEADER + named : self._used].view(torch.float32)
        for block, local, part in self._parts(index, counts, values):
            rows = block.of(vector)
            torch.index_select(rows, 0, local, out=part)
            if keep:
                rows.index_fill_(0, local, 0)

    def _mark(self, vector: Tensor) -> list[int]:
        """Flag the rows that are not zero; how many there are in each block."""
        found = []
        for block in self._blocks:
            flags, rows = self._flags[block.first : block.last], block.of(vector)
            if rows.device.type == "cpu":  # four times as fast as torch's
                np.logical_or.reduce(rows.numpy(), axis=1, out=flags.numpy())
            else:
                torch.any(rows, 1, out=flags)
            found.append(flags.count_nonzero())
        return [int(each) for each in torch.stack(found).tolist()]

    def _parts(self, index: Tensor, counts: Sequence[int], values: Tensor) -> Iterator[tuple[_Block, Tensor, Tensor]]:
        """Of each block that has any, the numbers within it of rows, and their values, ``[rows, width]``."""
        end = place = 0
        for block, count in zip(self._blocks, counts, strict=True):
            if count:
                part = values[place : place + count * block.width].view(count, block.width)
                yield block, index[end : end + count] - block.first, part
                end, place = end + count, place + count * block.width

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        found = [self._read(message) for message in messages] if self._blocks else []
        if not accumulate:
            out.zero_()
        for index, counts, values in found:
            if index is None:
                out.add_(values, alpha=weight)
                continue
            for block, local, part in self._parts(index, counts, values):
                block.of(out).index_add_(0, local, part, alpha=weight)

    def _read(self, message: Tensor) -> tuple[Tensor | None, list[int], Tensor]:
        """Numbers of the rows (None: all), how many are in each block, and the values of all of them.

        Raises:
            ValueError: the bytes are none that ``encode`` makes.
        """
        if len(message) < HEADER:
            raise damaged(f"its header takes {HEADER} bytes, and {len(message)} are left")
        if message.storage_offset() % 4 or not message.is_contiguous():
            message = message.clone()  # where float32 may not stand
        count, kind = message[:HEADER].view(torch.int32).tolist()
        if kind not in (LIST, BITMAP, ALL) or not 0 <= count <= self._rows or (kind == ALL and count < self._rows):
            raise damaged(f"it says that it has {count} of {self._rows} rows, named in way {kind}")
        if kind == ALL:
            return None, [], self._take(message, HEADER, 4 * self.layout.numel).view(torch.float32)
        named = 4 * count if kind == LIST else self._bitmap
        names = self._take(message, HEADER, named)
        index = names.view(torch.int32).long() if kind == LIST else _set_bits(names)
        self._check(index, count)
        bounds = torch.tensor([0, *(block.last for block in self._blocks)], device=index.device)
        counts = [stop - start for start, stop in pairwise(torch.searchsorted(index, bounds).tolist())]
        size = 4 * sum(found * block.width for found, block in zip(counts, self._blocks, strict=True))
        return index, counts, self._take(message, HEADER + named, size).view(torch.float32)

    def _take(self, message: Tensor, start: int, size: int) -> Tensor:
        if start + size > len(message):
            raise damaged(f"rows take {size} bytes, and {len(message) - start} are left")
        return message[start : start + size]

    def _check(self, index: Tensor, count: int) -> None:
        if len(index) != count:
            raise damaged(f"it has {len(index)} bits where it says {count}")
        if count and not (index[0] >= 0 and index[-1] < self._rows and (index.diff() > 0).all()):
            raise damaged(f"its rows, of {self._rows}, do not ascend")


def _set_bits(packed: Tensor) -> Tensor:
    bits = torch.empty(8 * len(packed), device=packed.device)
    unpack(packed, bits)
    return bits.nonzero().flatten()
