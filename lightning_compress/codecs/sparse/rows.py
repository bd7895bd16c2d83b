"""Lossless coding of gradients with few nonzero rows, as meProp produces them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.codec import Codec, Plan, SourcePlan, check_density
from lightning_compress.codecs.packing.bits import damaged, pack, unpack
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Source

HEADER = 8
"""Bytes of the header: the number of rows, and the coding of their indices."""
LIST, BITMAP, ALL = range(3)
"""Codings of row indices: a list of int32, one bit per row, or nothing because all rows are sent."""


@dataclass(frozen=True)
class Rows(Codec):
    """Send the rows that are not all zero, exactly. There is no residual.

    A row is one index of a parameter's first dimension: one output of a Linear layer or a convolution, one word of an
    embedding, one element of a bias. In a layer trained by meProp (``backward=meprop``), the weight's gradient has few
    nonzero rows, different ones on each rank. The mean has the union of these rows. Other gradients are sent whole,
    plus 8 bytes.

    Messages vary in length. A message is the number of rows and a code as int32, then the row indices, then the rows as
    float32. The code is that of the smallest coding of the indices: 0 for int32, 1 for one bit per row in whole words
    of 32 bits, 2 for nothing, if all rows are sent. Rows are numbered through the whole vector. A shard that starts or
    ends within a row has a part of it. On an accelerator, the host waits for the number of rows.

    Args:
        density: expected share of nonzero rows, in (0, 1]. Only ``exchange="auto"`` uses it; messages may hold any
            number of rows.

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
        check_density("Rows", self.density, "0.1 expects one row in ten")

    @property
    def sent_share(self) -> float:
        """See ``Codec.sent_share``."""
        return self.density

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """See ``Codec.plan``; ``summands`` is ignored, because messages cannot be summed."""
        return _RowsPlan(layout, device, self.density)


@dataclass(frozen=True)
class _Block:
    """Rows ``first`` to ``last - 1`` of the vector. They have equal width and are contiguous from ``start`` on."""

    start: int
    width: int
    first: int
    last: int

    def of(self, vector: Tensor) -> Tensor:
        """Return a view of these rows, ``[rows, width]``."""
        count = self.last - self.first
        return vector[self.start : self.start + count * self.width].view(count, self.width)


def _blocks(layout: Layout) -> Iterator[_Block]:
    """Yield blocks of each segment: the end of a cut row, whole rows, and the beginning of a cut row."""
    first = 0
    for segment in layout.segments:
        width, place = max(1, math.prod(segment.shape[1:])), segment.offset
        before = min(-segment.start % width, segment.numel)
        whole, after = divmod(segment.numel - before, width)
        for count, length in ((1, before), (whole, width), (1, after)):
            if count and length:
                yield _Block(place, length, first, first + count)
                place, first = place + count * length, first + count


class _RowsPlan(SourcePlan):
    variable = True

    def __init__(self, layout: Layout, device: torch.device, density: float) -> None:
        super().__init__(layout)
        self._blocks = list(_blocks(layout))
        self._rows = self._blocks[-1].last if self._blocks else 0
        self._bitmap = 4 * -(-self._rows // 32)
        self._flags = torch.zeros(8 * self._bitmap, dtype=torch.bool, device=device)  # one per row, and padding
        self.message_size = HEADER + 4 * layout.numel if layout.numel else 0
        likely = HEADER + density * (4 * layout.numel) + min(4 * density * self._rows, self._bitmap)
        self._expected = min(math.ceil(likely), self.message_size)

    def encode_from(self, source: Source, rest: Tensor | None, message: Tensor, key: int) -> None:
        """See ``Plan.encode_from``."""
        vector, keep = source.into(rest), rest is not None
        if not self._blocks:
            return
        counts = self._mark(vector)
        count = sum(counts)
        size = 4 * sum(rows * block.width for rows, block in zip(counts, self._blocks, strict=True))
        named = min(4 * count, self._bitmap)
        kind = ALL if named + size >= 4 * self.layout.numel else LIST if named == 4 * count else BITMAP
        header = torch.tensor([self._rows if kind == ALL else count, kind], dtype=torch.int32)
        message[:HEADER].view(torch.int32).copy_(header)
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
        """Set the flags of nonzero rows, and return their number in each block."""
        counts = []
        for block in self._blocks:
            flags, rows = self._flags[block.first : block.last], block.of(vector)
            if rows.device.type == "cpu":  # four times as fast as torch
                np.logical_or.reduce(rows.numpy(), axis=1, out=flags.numpy())
            else:
                torch.any(rows, 1, out=flags)
            counts.append(flags.count_nonzero())
        return [int(count) for count in torch.stack(counts).tolist()]

    def _parts(self, index: Tensor, counts: Sequence[int], values: Tensor) -> Iterator[tuple[_Block, Tensor, Tensor]]:
        """Yield each block with nonzero rows, their indices within the block, and their values, ``[rows, width]``."""
        end = place = 0
        for block, count in zip(self._blocks, counts, strict=True):
            if count:
                part = values[place : place + count * block.width].view(count, block.width)
                yield block, index[end : end + count] - block.first, part
                end, place = end + count, place + count * block.width

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        decoded = [self._read(message) for message in messages] if self._blocks else []
        if not accumulate:
            out.zero_()
        for index, counts, values in decoded:
            if index is None:
                out.add_(values, alpha=weight)
                continue
            for block, local, part in self._parts(index, counts, values):
                block.of(out).index_add_(0, local, part, alpha=weight)

    def _read(self, message: Tensor) -> tuple[Tensor | None, list[int], Tensor]:
        """Return the row indices (None for all rows), their number in each block, and the values of all rows.

        Raises:
            ValueError: ``encode`` does not write such bytes.
        """
        if len(message) < HEADER:
            raise damaged(f"its header takes {HEADER} bytes, but it has only {len(message)}")
        if message.storage_offset() % 4 or not message.is_contiguous():
            message = message.clone()  # unaligned for float32
        count, kind = message[:HEADER].view(torch.int32).tolist()
        if kind not in (LIST, BITMAP, ALL) or not 0 <= count <= self._rows or (kind == ALL and count < self._rows):
            raise damaged(f"its header says {count} of {self._rows} rows, with coding {kind}")
        if kind == ALL:
            return None, [], self._take(message, HEADER, 4 * self.layout.numel).view(torch.float32)
        named = 4 * count if kind == LIST else self._bitmap
        names = self._take(message, HEADER, named)
        index = names.view(torch.int32).long() if kind == LIST else _set_bits(names)
        self._check(index, count)
        bounds = torch.tensor([0, *(block.last for block in self._blocks)], dtype=torch.int64, device=index.device)
        counts = [stop - start for start, stop in pairwise(torch.searchsorted(index, bounds).tolist())]
        size = 4 * sum(rows * block.width for rows, block in zip(counts, self._blocks, strict=True))
        return index, counts, self._take(message, HEADER + named, size).view(torch.float32)

    def _take(self, message: Tensor, start: int, size: int) -> Tensor:
        if start + size > len(message):
            raise damaged(f"rows take {size} bytes, but only {len(message) - start} are left")
        return message[start : start + size]

    def _check(self, index: Tensor, count: int) -> None:
        if len(index) != count:
            raise damaged(f"its bitmap has {len(index)} rows, but its header says {count}")
        if count and not (index[0] >= 0 and index[-1] < self._rows and (index.diff() > 0).all()):
            raise damaged(f"its row indices do not ascend, or are not below {self._rows}")


def _set_bits(packed: Tensor) -> Tensor:
    bits = torch.empty(8 * len(packed), dtype=torch.float32, device=packed.device)
    unpack(packed, bits)
    return bits.nonzero().flatten()
