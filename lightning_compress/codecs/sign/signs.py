"""What the codecs that send a sign per element share: blocks, packing, and the shape of the message."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.base import FusedPlan, Plan, aligned
from lightning_compress.codecs.packing.bits import pack, packed_size, unpack
from lightning_compress.codecs.packing.buckets import bucket_shape
from lightning_compress.core.buffers import chunk_size, pieces, scratch
from lightning_compress.core.layout import Layout
from lightning_compress.kernels import Summands


class Signs(Plan):
    """``v >= 0`` as one bit, and some float32 values for each block of consecutive elements.

    A message is every block's first value, then every block's second one and so on, zeros up to a multiple of 16
    bytes, then the bits, the first one lowest.

    Args:
        layout: what the vector is made of.
        block: elements that share the values; a multiple of 8, and no more than a short vector has.
        values: how many values a block has.
    """

    def __init__(self, layout: Layout, block: int, values: int) -> None:
        super().__init__(layout)
        self._block, self._blocks = bucket_shape(layout.numel, block)
        self._header = 4 * values * self._blocks
        self._bits = aligned(self._header)
        self.message_size = self._bits + packed_size(layout.numel)


class SignPlan(Signs):
    """The same by tensor operations, and by the kernels of a CPU.

    Args:
        layout, block, values: see ``Signs``.
        device: where vectors are.
    """

    def __init__(self, layout: Layout, device: torch.device, block: int, values: int) -> None:
        super().__init__(layout, block, values)
        block = self._block
        whole, rest = divmod(layout.numel, block)
        self._values = torch.empty(values, self._blocks, dtype=torch.float32, device=device)
        rows = max(1, min(chunk_size(device) // block, self._blocks))
        buffers = _Buffers(rows * block, rows, device)
        self._kernels = kernels.backend(__name__, device, "numba") if block % 32 == 0 else None
        self._whole = slice(0, whole), slice(0, whole * block), slice(self._bits, self._bits + whole * block // 8)
        self._pieces = [
            SignPiece(blocks, slice(blocks.start * block, blocks.stop * block), self._bits, buffers)
            for blocks in pieces(0 if self._kernels else whole, rows)
        ]
        if rest:
            self._pieces.append(
                SignPiece(slice(whole, whole + 1), slice(whole * block, layout.numel), self._bits, buffers)
            )

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """Move content from the vector into the message; see the base class."""
        self.check(vector, message)
        if self._kernels:
            blocks, elements, bits = self._whole
            words, values = message[bits].numpy().view(np.uint32), self._values[:, blocks].numpy()
            self.kernel(self._kernels)(vector[elements].numpy(), words, values)
        for piece in self._pieces:
            rows = vector[piece.elements].view(piece.shape)
            piece.pack(rows, message)
            self.subtract(piece, rows, self._values[:, piece.blocks])
        message[: self._header] = self._values.view(torch.uint8).view(-1)
        message[self._header : self._bits] = 0

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Write the weighted sum of the messages; see the base class."""
        self.check(out, messages)
        header = messages[:, : self._header].clone(memory_format=torch.contiguous_format)
        values = (
            header.view(-1).view(torch.float32).view(len(messages), len(self._values), self._blocks, 1).mul_(weight)
        )
        if self._kernels:
            blocks, elements, bits = self._whole
            words = messages.numpy()[:, bits].view(np.uint32)
            high, low = (each.numpy() for each in self.levels(values[:, :, blocks, 0]))
            self._kernels.add_signs(words, high, low, out[elements].numpy(), accumulate)
        for piece in self._pieces:
            rows = out[piece.elements].view(piece.shape)
            if not accumulate:
                rows.zero_()
            for message, own in zip(messages, values[:, :, piece.blocks], strict=True):
                self.add(rows, piece.unpack(message), own)

    @abstractmethod
    def kernel(self, module: ModuleType) -> Callable[..., None]:
        """The kernel that does what ``subtract`` does, and packs the bits."""

    @abstractmethod
    def levels(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """What bits of 1 and of 0 stand for, ``[messages, blocks]`` each, by ``values [messages, values, blocks]``."""

    @abstractmethod
    def subtract(self, piece: SignPiece, rows: Tensor, values: Tensor) -> None:
        """Find the values of a piece's blocks, and take what they say off its elements.

        Args:
            piece: a run of blocks.
            rows: float32 ``[blocks, block]``; holds afterwards what was not sent.
            values: float32 ``[values, blocks]``, to be written.
        """

    @abstractmethod
    def add(self, rows: Tensor, signs: Tensor, values: Tensor) -> None:
        """Add what a message says.

        Args:
            rows: float32 ``[blocks, block]``.
            signs: like ``rows``: 1.0 for ``v >= 0`` and 0.0 for the others; may be overwritten.
            values: float32 ``[values, blocks, 1]``, times the weight.
        """


class _Buffers:
    """Scratch for a run of blocks."""

    def __init__(self, numel: int, rows: int, device: torch.device) -> None:
        self.bits = scratch("sign bits", numel, torch.bool, device)
        self.floats = scratch("sign floats", numel, torch.float32, device)
        self.wide = scratch("sign wide", numel, torch.float64, device)
        self.sums = scratch("sign sums", 2 * rows, torch.float64, device)
        self.counts = scratch("sign counts", 2 * rows, torch.float64, device)


class SignPiece:
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


class FusedSigns(FusedPlan, Signs):
    """See ``Signs`` and ``signs_triton.py``; blocks of up to ``LONGEST`` elements."""

    def __init__(self, layout: Layout, device: torch.device, block: int, values: int) -> None:
        super().__init__(layout, block, values)
        self._kernel: Any = kernels.backend(__name__, device, "triton")
        self._shape = (self._block, values, self._bits)

    @staticmethod
    def fits(block: int, device: torch.device) -> bool:
        """Whether the device has kernels for blocks of this many elements."""
        kernel = kernels.backend(__name__, device, "triton")
        return kernel is not None and block <= kernel.LONGEST

    def encode(self, vector: Tensor, message: Tensor, key: int, keep: bool = True, summands: Summands = None) -> None:
        """See ``Plan.encode``."""
        self.check(vector, message)
        self._kernel.encode(vector, summands, message, *self._shape)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        self.check(out, messages)
        self._kernel.decode(messages, out, weight, accumulate, *self._shape)
