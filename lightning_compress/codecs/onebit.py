"""1-bit SGD: a sign per element and two reconstruction values per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.base import Codec, Plan, aligned
from lightning_compress.codecs.bits import check, chunk_size, pack, packed_size, pieces, scratch, unpack
from lightning_compress.layout import Layout


@dataclass(frozen=True)
class OneBit(Codec):
    """Send ``v >= 0`` as one bit, and for each block the mean of either side: ``1 + 64 / block`` bits per element.

    In each block of consecutive elements ``hi`` is the mean of those with ``v >= 0`` and ``lo`` that of the others
    (0 where there is none). The receiver puts these in place; ``v - hi`` or ``v - lo`` stays in the vector, so what
    stays sums to zero in each block and is 1 - 2/pi = 0.363 of normal data's squared norm. The method is
    biased and needs error feedback. The paper's blocks are the columns of a weight matrix; fixed ones do not
    degenerate for convolutions and narrow layers. A message is every block's ``hi``, then every
    block's ``lo`` as float32, zeros up to a multiple of 16 bytes, then the bits, the first one lowest.

    Args:
        block: elements that share two means; a multiple of 8, at least 64 (2 bits per element, closest), and as large
            as one likes (a vector that is shorter is one block: 1 bit per element, coarsest).

    Raises:
        ValueError: block is no such number.

    Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs", Interspeech 2014.
    """

    contractive: ClassVar[bool] = True
    block: int = 1024

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 64 or self.block % 8:
            raise ValueError(f"OneBit(block={self.block!r}): block must be a multiple of 8, at least 64; try 1024")

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        return _OneBitPlan(layout, device, min(self.block, 8 * packed_size(max(1, layout.numel))))


class _OneBitPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, block: int) -> None:
        super().__init__(layout)
        whole, rest = divmod(layout.numel, block)
        self._blocks = whole + bool(rest)
        self._header = 8 * self._blocks
        self._bits = aligned(self._header)
        self.message_size = self._bits + packed_size(layout.numel)
        self._means = torch.empty(2, self._blocks, device=device)
        rows = max(1, min(chunk_size(device) // block, self._blocks))
        buffers = _Buffers(rows * block, rows, device)
        self._pieces = [
            _Piece(blocks, slice(blocks.start * block, blocks.stop * block), self._bits, buffers)
            for blocks in pieces(whole, rows)
        ]
        if rest:
            self._pieces.append(
                _Piece(slice(whole, whole + 1), slice(whole * block, layout.numel), self._bits, buffers)
            )

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        check(vector, message, self.layout.numel, self.message_size)
        for piece in self._pieces:
            rows = vector[piece.elements].view(piece.shape)
            piece.pack(rows, message)
            means = self._means[:, piece.blocks]
            signs = piece.average(rows, means)
            high, low = means.unsqueeze(2)
            rows.addcmul_(signs, high, value=-1)  # each element is rounded once: the other product is 0
            rows.addcmul_(signs.sub_(1), low)
        message[: self._header] = self._means.view(torch.uint8).view(-1)
        message[self._header : self._bits] = 0

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        check(out, messages, self.layout.numel, self.message_size)
        header = messages[:, : self._header].clone(memory_format=torch.contiguous_format)
        means = header.view(-1).view(torch.float32).view(len(messages), 2, self._blocks, 1).mul_(weight)
        for piece in self._pieces:
            rows = out[piece.elements].view(piece.shape)
            if not accumulate:
                rows.zero_()
            for message, (high, low) in zip(messages, means[:, :, piece.blocks], strict=True):
                signs = piece.unpack(message)
                rows.addcmul_(signs, high)
                rows.addcmul_(signs.sub_(1), low, value=-1)


class _Buffers:
    """Scratch for a run of blocks."""

    def __init__(self, numel: int, rows: int, device: torch.device) -> None:
        self.bits = scratch("onebit bits", numel, torch.bool, device)
        self.floats = scratch("onebit floats", numel, torch.float32, device)
        self.wide = scratch("onebit wide", numel, torch.float64, device)
        self.sums = scratch("onebit sums", 2 * rows, torch.float64, device)
        self.counts = scratch("onebit counts", 2 * rows, torch.float64, device)


class _Piece:
    """A run of blocks that fits in a cache, with its views of the scratch (making them costs as much as using them)."""

    def __init__(self, blocks: slice, elements: slice, offset: int, buffers: _Buffers) -> None:
        count, numel = blocks.stop - blocks.start, elements.stop - elements.start
        self.blocks, self.elements, self.shape = blocks, elements, (count, numel // count)
        self.packed = slice(offset + elements.start // 8, offset + packed_size(elements.stop))
        self.unpacked = buffers.floats[: 8 * packed_size(numel)]
        self.bits = buffers.bits[:numel].view(self.shape)
        self.floats = buffers.floats[:numel].view(self.shape)
        self.wide = buffers.wide[:numel].view(self.shape)
        self.sums = buffers.sums[: 2 * count].view(2, count)
        self.counts = buffers.counts[: 2 * count].view(2, count)

    def pack(self, rows: Tensor, message: Tensor) -> None:
        """Write the bits of this piece into the message."""
        if rows.device.type == "cpu":  # three times as fast as torch.ge into booleans
            np.greater_equal(rows.numpy(), 0, out=self.bits.numpy())
        else:
            torch.ge(rows, 0, out=self.bits)
        pack(self.bits.view(-1), message[self.packed])

    def unpack(self, message: Tensor) -> Tensor:
        """1.0 where the message has a bit of this piece and 0.0 elsewhere; in scratch."""
        unpack(message[self.packed], self.unpacked)
        return self.floats

    def average(self, rows: Tensor, means: Tensor) -> Tensor:
        """Mean of either side of each block, summed in float64 so that every device writes the same bytes.

        Returns:
            1.0 where an element is on the upper side and 0.0 elsewhere; in scratch.
        """
        high, low = self.sums
        torch.sum(self.wide.copy_(rows), dim=1, out=low)
        torch.sum(self.wide.clamp_(min=0), dim=1, out=high)
        low.sub_(high)
        if rows.device.type != "cpu" or torch.any(low.neg() < high * 1e-3):  # few digits are left of the difference
            torch.sum(self.wide.copy_(rows).clamp_(max=0), dim=1, out=low)
        signs = torch.ge(rows, 0, out=self.floats)  # floats, as torch compares into these by vectors
        upper, lower = self.counts
        upper.copy_(signs.sum(dim=1))  # of ones, so exact
        torch.sub(self.shape[1], upper, out=lower)
        means.copy_(self.sums.div_(self.counts.clamp_(min=1)))
        return signs
