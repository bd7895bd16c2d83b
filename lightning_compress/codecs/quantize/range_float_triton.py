"""GPU kernels of ``range_float.py``. Bit-identical to its tensor operations."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.packing.block_coder_triton import LONGEST as LONGEST
from lightning_compress.codecs.packing.block_coder_triton import BlockCoder
from lightning_compress.codecs.quantize import minifloat_triton
from lightning_compress.core.random import Stream
from lightning_compress.core.source import Source
from lightning_compress.kernels.triton.launch import OPTIONS, kernel, read_sum, width_of


@dataclass(frozen=True)
class Ranges:
    """Encodes and decodes; see ``Kernel``. A thread holds 16 elements, because more would take too many registers.

    Args:
        block: elements that share a range, at most ``LONGEST``; a multiple of 8.
        bits: bits of a code.
        nearest: round to nearest instead of truncating.
        mantissa: bits of mantissa, or -1 for those with the least error on a sample.
        body: first byte of the codes in the message.
        errors: float64 ``[rows, candidates]``, scratch for the squared errors of each row of the sample.
        sample: the sample: elements of a row, distance between rows, and distance between elements that are used.
    """

    block: int
    bits: int
    nearest: bool
    mantissa: int
    body: int
    errors: Tensor
    sample: tuple[int, int, int]

    @property
    def _coder(self) -> BlockCoder:
        setting = self.nearest, self.mantissa, *self.errors.shape
        shape = self.block, self.bits, 2, self.body, setting
        return BlockCoder(_encode, _decode, *shape, tile=4096, each=16, head=16, extra=self.errors)

    def encode(self, source: Source, rest: Tensor | None, message: Tensor, stream: Stream) -> None:
        """See ``Kernel``."""
        if self.mantissa < 0:  # measure the error of each candidate
            length, distance, skip = self.sample
            (first, second, _), added, _ = source.pointers(rest)
            shape = width_of(length), self.bits, self.nearest, added
            _measure[tuple(self.errors.shape)](
                first, second, self.errors, distance, length, skip, *shape, **OPTIONS | {"num_warps": 8}
            )
        self._coder.encode(source, rest, message, stream)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        self._coder.decode(messages, out, weight, accumulate)


@kernel
def _measure(
    first, second, errors, distance: tl.int64, length, skip,
    WIDTH: tl.constexpr, BITS: tl.constexpr, NEAREST: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    row, mantissa, column = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    inside = column < length
    numbers = read_sum(first + row * distance, second + row * distance, column, inside, SUM, False)[None, :]
    low, high = tl.min(numbers, axis=1), tl.max(numbers, axis=1)
    error = minifloat_triton.error(numbers, *minifloat_triton.build(low, high, mantissa, BITS, NEAREST)).to(tl.float64)
    counts = (inside & (column % skip == 0))[None, :]
    squares = tl.sum(tl.where(counts, error * error, 0.0), axis=1)
    index = row * tl.num_programs(1) + mantissa
    tl.store(errors + index + tl.arange(0, 1), squares)


@triton.jit
def _encode(
    numbers, inside, number, numel, state, move, message, errors,
    BLOCK: tl.constexpr, BITS: tl.constexpr, SETTING: tl.constexpr,
):  # fmt: skip
    NEAREST: tl.constexpr = SETTING[0]
    MANTISSA: tl.constexpr = SETTING[1]
    if MANTISSA < 0:
        mantissa = minifloat_triton.best(errors, SETTING[2], SETTING[3])
    else:
        mantissa = tl.full([], MANTISSA, tl.int32)
    low, high = tl.min(numbers, axis=1), tl.max(numbers, axis=1)
    low, high = tl.where(low < 0, low, 0.0), tl.where(high > 0, high, 0.0)  # neither is -0.0
    codes, sent = minifloat_triton.encode(numbers, *minifloat_triton.build(low, high, mantissa, BITS, NEAREST))
    if tl.program_id(0) == 0:
        minifloat_triton.write_mantissa(message, mantissa)
    return low, high, codes, sent


@triton.jit
def _decode(low, high, codes, weight, head, BITS: tl.constexpr, SETTING: tl.constexpr):
    mantissa = tl.load(head).to(tl.int32, bitcast=True)
    shift, _, below, positive, negative = minifloat_triton.build(low, high, mantissa, BITS, SETTING[0])
    magnitudes, minus = minifloat_triton.decode(codes, shift, below, positive, negative, BITS)
    magnitudes *= weight
    return tl.where(minus, -magnitudes, magnitudes)
