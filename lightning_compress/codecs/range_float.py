"""Range-based floats: every element rounded to a float of N bits that is made for its block's range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_compress.codecs.base import Codec, Plan, aligned
from lightning_compress.codecs.bits import check, chunk_size, code_bytes, pack_codes, pieces, scratch, unpack_codes
from lightning_compress.codecs.minifloat import (
    best_mantissa,
    build,
    check_settings,
    code_dtype,
    decode_all,
    decode_into,
    encode_into,
)
from lightning_compress.layout import Layout

Rounding = Literal["nearest", "truncate"]
SAMPLE = 4
"""Blocks that the mantissa is chosen on."""
SAMPLE_NUMEL = 1024
"""Elements of each of them, at most."""
EDGE = 2.0**127
"""Beyond this magnitude rounding may pass the largest float."""


@dataclass(frozen=True)
class RangeFloat(Codec):
    """Send each element as a float of N bits whose codes cover its block's range: ``N + 64 / block`` bits per element.

    In a block with least value ``lo`` and largest value ``hi``, the ``2^N`` codes stand for 0 and for the floats with
    ``m`` bits of mantissa from ``eps`` up to ``hi`` and down to ``lo``, see ``codecs/minifloat.py``. The relative error
    is at most ``2^-(m+1)`` down to ``eps`` (``2^-m`` for "truncate"); what is smaller is sent as 0, and the rounding of
    the ends is that of all elements. What was not sent stays in the vector, exactly.

    The ranges are those of this very vector and travel with it, so there is no state, nothing saturates, and no range
    grows stale. The paper describes ranges that are estimated in the first iterations; how, is not verified.

    The method is biased (without error feedback, what is below ``eps`` is never sent), hence error feedback by default.
    At 8 bits it keeps back 1.3 % of the norm of normal data, so it counts as safe beside Adam; no training was run.

    A message is the bits of mantissa as int32 and zeros up to 16 bytes; ``lo`` of every block and ``hi`` of every
    block as float32, zeros up to a multiple of 16 bytes; the codes, the first one in the lowest bits, and again zeros.

    Args:
        bits: N, 2 (coarsest: 0 and three other values) to 16, or 32 (with 23 bits of mantissa nothing is lost).
        mantissa: m, 0 (only powers of two, the widest reach) to ``min(N - 1, 23)`` (the finest, over about a binade
            of either sign); "auto" takes the one of 0 to ``N - 2`` with the least squared error on a sample of each
            message.
        block: elements that share a range; a multiple of 8, at least 64, and as large as one likes.
        rounding: "nearest", or "truncate", which is the paper's and makes magnitudes smaller on average.

    Raises:
        ValueError: a setting is none of these.

    Wang, Wu, Zhang, Liu, Bosilca, Herlihy, Fonseca, "FFT-based Gradient Sparsification for the Distributed Training of
    Deep Neural Networks", HPDC 2020, arXiv 1811.08596 (a reconstruction: the authors' quantiser is not released).
    """

    contractive: ClassVar[bool] = True
    bits: int = 8
    mantissa: int | Literal["auto"] = "auto"
    block: int = 4096
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_settings("RangeFloat", self.bits, self.mantissa)
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 64 or self.block % 8:
            raise ValueError(f"RangeFloat(block={self.block!r}): block must be a multiple of 8, at least 64; try 4096")
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"RangeFloat(rounding={self.rounding!r}): rounding must be 'nearest' or 'truncate'")

    @property
    def safe_with_adam(self) -> bool:
        """From 8 bits on, where hardly anything waits in the residual; no training was measured."""
        return self.bits >= 8

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        return _RangeFloatPlan(layout, device, self)


class _RangeFloatPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, codec: RangeFloat) -> None:
        super().__init__(layout)
        self._codec, self._nearest = codec, codec.rounding == "nearest"
        whole, rest = divmod(layout.numel, codec.block)
        self._blocks = whole + bool(rest)
        self._ranges = slice(16, 16 + 8 * self._blocks) if layout.numel else slice(0, 0)
        self._codes = aligned(self._ranges.stop)
        self._used = self._codes + code_bytes(layout.numel, codec.bits)
        self.message_size = aligned(self._used)
        rows = max(1, min(chunk_size(device) // codec.block, whole))
        self._pieces = [(blocks, codec.block) for blocks in pieces(whole, rows)]
        if rest:
            self._pieces.append((slice(whole, whole + 1), rest))
        size = min(layout.numel, rows * codec.block)
        kind = code_dtype(codec.bits)
        self._floats = scratch("range_float floats", size, torch.float32, device)
        self._numbers = scratch(f"range_float {kind}", size, kind, device)
        self._spare = scratch(f"range_float spare {kind}", size, kind, device)
        few = 4 * 2**codec.bits <= codec.block
        self._indices = scratch("range_float indices", size, torch.int64, device) if few else None
        self._low, self._high = torch.empty(2, self._blocks, device=device)

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        check(vector, message, self.layout.numel, self.message_size)
        if not self.layout.numel:
            return
        for blocks, length in self._pieces:
            rows = self._rows(vector, blocks, length)
            torch.amin(rows, dim=1, out=self._low[blocks])
            torch.amax(rows, dim=1, out=self._high[blocks])
        self._low.clamp_(max=0)
        self._high.clamp_(min=0)
        mantissa = self._mantissa(vector)
        formats = build(self._codec.bits, mantissa, self._low, self._high, self._nearest)
        edge = vector.device.type != "cpu" or bool(self._high.max() > EDGE or self._low.min() < -EDGE)
        for blocks, length in self._pieces:
            rows, part = self._rows(vector, blocks, length), formats.some(blocks)
            floats, numbers, spare = self._scratch(rows)
            inside = torch.clamp(rows, part.lowest, part.highest) if edge else rows
            encode_into(inside, part, self._nearest, floats, numbers, spare)
            rows.sub_(floats)
            pack_codes(numbers.view(-1), self._codec.bits, message[self._place(blocks, rows)])
        message[: self._codes] = message[self._used :] = 0
        message[:4].view(torch.int32).copy_(mantissa)
        message[self._ranges].view(torch.float32).copy_(torch.cat([self._low, self._high]))

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        check(out, messages, self.layout.numel, self.message_size)
        formats = []
        for message in messages if self.layout.numel else ():
            low, high = message[self._ranges].view(torch.float32).view(2, -1)
            formats.append(build(self._codec.bits, message[:4].view(torch.int32)[0], low, high, self._nearest))
        for blocks, length in self._pieces:
            rows = self._rows(out, blocks, length)
            if not accumulate:
                rows.zero_()
            floats, numbers, spare = self._scratch(rows)
            for message, each in zip(messages, formats, strict=True):
                packed, part = message[self._place(blocks, rows)], each.some(blocks)
                if self._indices is not None:  # look the codes up among all of them
                    indices = self._indices[: rows.numel()].view(rows.shape)
                    unpack_codes(packed, self._codec.bits, indices.view(-1))
                    torch.gather(decode_all(part), 1, indices, out=floats)
                else:
                    unpack_codes(packed, self._codec.bits, numbers.view(-1))
                    decode_into(numbers, part, floats, spare)
                rows.add_(floats, alpha=weight)

    def _mantissa(self, vector: Tensor) -> Tensor:
        if self._codec.mantissa != "auto":
            return torch.tensor(self._codec.mantissa, device=vector.device)
        length = self._pieces[0][1]
        whole = slice(0, max(1, self.layout.numel // length))
        chosen = slice(0, whole.stop, -(-whole.stop // SAMPLE))
        sample = self._rows(vector, whole, length)[chosen, :: -(-length // SAMPLE_NUMEL)].contiguous()
        return best_mantissa(sample, self._codec.bits, self._low[chosen], self._high[chosen], self._nearest)

    def _rows(self, vector: Tensor, blocks: slice, length: int) -> Tensor:
        start = blocks.start * self._codec.block
        count = blocks.stop - blocks.start
        return vector[start : start + count * length].view(count, length)

    def _scratch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        buffers = (self._floats, self._numbers, self._spare)
        floats, numbers, spare = (each[: rows.numel()].view(rows.shape) for each in buffers)
        return floats, numbers, spare

    def _place(self, blocks: slice, rows: Tensor) -> slice:
        start = self._codes + code_bytes(blocks.start * self._codec.block, self._codec.bits)
        return slice(start, start + code_bytes(rows.numel(), self._codec.bits))
