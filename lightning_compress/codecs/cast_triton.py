"""GPU kernels of ``cast.py``. Bit-identical to its tensor operations.

bfloat16 is handled as int16, the upper half of a float32: rounding is then two integer additions on all GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.codec import Shard, Shards
from lightning_compress.core.random import Stream
from lightning_compress.core.source import Source
from lightning_compress.core.told import Fold
from lightning_compress.core.told_triton import fold_heads, fold_of, sound
from lightning_compress.kernels.triton.launch import OPTIONS, kernel, read, read_sum, shard, write
from lightning_compress.kernels.triton.random_bits import random16, signed

_ROWS = tl.constexpr(512)
"""Rows of four elements that a program handles."""
_TILE = tl.constexpr(4 * _ROWS.value)
_LARGEST = tl.constexpr(3.3895313892515355e38)
"""The largest bfloat16."""


@dataclass(frozen=True)
class Halves:
    """Casts to a 16-bit format, rounded to nearest, and back; see ``Kernel``.

    Args:
        dtype: float16 or bfloat16.
        limit: the largest magnitude that is sent.
    """

    dtype: torch.dtype
    limit: float

    def encode(self, source: Source, rest: Tensor | None, message: Tensor, stream: Stream) -> None:
        """See ``Kernel``."""
        halves, (vectors, *constants) = self._halves(message), source.pointers(rest)
        _encode[_grid(vectors[0])](*vectors, halves, self.limit, len(vectors[0]), *constants, **OPTIONS)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        halves = self._halves(messages)
        _decode[_grid(out)](halves, 2 * halves.stride(0), out, weight, len(out), accumulate, len(messages), **OPTIONS)

    def shards(self, shards: Sequence[Shard], device: torch.device) -> Shards | None:
        """See ``ShardCoder``."""
        if any(each.coder != self for each in shards):
            return None
        tiles = [(tile, each) for each in shards for tile in range(triton.cdiv(each.numel, _TILE.value))]
        return Shards.of([(tile, each.start, each.numel, each.at // 2) for tile, each in tiles], shards, device)

    def encode_shards(self, source: Source, rest: Tensor | None, messages: Tensor, shards: Shards, key: int) -> None:
        """See ``ShardCoder``."""
        vectors, *constants = source.pointers(rest)
        inputs = *vectors, self._halves(messages), shards.table, self.limit
        _encode_shards[(len(shards.table),)](*inputs, *constants, **OPTIONS)

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor, weight: float, accumulate: bool, fold: Fold | None
    ) -> None:
        """See ``ShardCoder``."""
        folded, constants = fold_of(fold, messages)
        inputs = self._halves(messages), messages, messages.stride(0), shards.table, out, weight, *folded
        _decode_shards[(len(shards.table),)](*inputs, accumulate, *constants, **OPTIONS)

    def _halves(self, message: Tensor) -> Tensor:
        return message.view(torch.int16 if self.dtype == torch.bfloat16 else self.dtype)


def round_at_random(values: Tensor, out: Tensor, state: int) -> None:
    """Round float32 ``values [n]`` to bfloat16 ``out [n]``, by the random words that follow ``state``."""
    if len(values):
        _round[_grid(values)](values, out.view(torch.int16), signed(state), len(values), **OPTIONS)


def _grid(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(len(vector), _TILE.value),)


@kernel(do_not_specialize=["numel"])
def _encode(first, second, vector, halves, limit, numel, SUM: tl.constexpr, KEEP: tl.constexpr):
    _encode_part(tl.program_id(0), first, second, vector, halves, limit, numel, SUM, KEEP)


@kernel
def _encode_shards(first, second, vector, halves, table, limit, SUM: tl.constexpr, KEEP: tl.constexpr):
    tile, start, numel, at = shard(table)
    _encode_part(tile, first + start, second + start, vector + start, halves + at, limit, numel, SUM, KEEP)


@triton.jit
def _encode_part(tile, first, second, vector, halves, limit, numel, SUM: tl.constexpr, KEEP: tl.constexpr):
    if (tile + 1).to(tl.int64) * _TILE <= numel:
        _encode_tile(tile, first, second, vector, halves, limit, numel, SUM, KEEP, True)
    else:
        _encode_tile(tile, first, second, vector, halves, limit, numel, SUM, KEEP, False)


@triton.jit
def _encode_tile(
    tile, first, second, vector, halves, limit, numel, SUM: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr
):
    start, index, inside = _indices(tile, numel)
    numbers = read_sum(first + start, second + start, index, inside, SUM, WHOLE)
    small = tl.maximum(tl.minimum(numbers, limit), -limit)
    half = halved(small, halves.dtype.element_ty)
    write(halves + start, index, half, inside, WHOLE)
    if KEEP:
        write(vector + start, index, numbers - floats(half), inside, WHOLE)


@kernel(do_not_specialize=["numel"])
def _decode(halves, stride: tl.int64, out, weight, numel, ADD: tl.constexpr, MESSAGES: tl.constexpr):
    _decode_part(tl.program_id(0), None, halves, stride, out, weight, numel, None, None, ADD, MESSAGES)


@kernel(do_not_specialize=["rank", "marked"])
def _decode_shards(
    halves, messages, stride: tl.int64, table, out, weight, rank, own, flag, mask, marked,
    ADD: tl.constexpr, MESSAGES: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    CLEARS: tl.constexpr,
):  # fmt: skip
    tile, start, numel, at = shard(table)
    inputs = tile, rank, halves + at, stride, out + start, weight, numel
    if WIDTH:
        _decode_part(*inputs, flag, own, ADD, MESSAGES)
        if tl.program_id(0) == 0:
            fold_heads(messages, stride, rank, own, flag, mask, marked, MESSAGES, WIDTH, BITS, BYTES, CLEARS)
    else:
        _decode_part(*inputs, None, None, ADD, MESSAGES)


@triton.jit
def _decode_part(tile, skip, halves, stride, out, weight, numel, flag, own, ADD: tl.constexpr, MESSAGES: tl.constexpr):
    if (tile + 1).to(tl.int64) * _TILE <= numel:
        _decode_tile(tile, skip, halves, stride, out, weight, numel, flag, own, ADD, MESSAGES, True)
    else:
        _decode_tile(tile, skip, halves, stride, out, weight, numel, flag, own, ADD, MESSAGES, False)


@triton.jit
def _decode_tile(
    tile, skip, halves, stride, out, weight, numel, flag, own,
    ADD: tl.constexpr, MESSAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    start, index, inside = _indices(tile, numel)
    total = read(out + start, index, inside, WHOLE) if ADD else tl.zeros([_ROWS, 4], tl.float32)
    for message in range(MESSAGES):
        added = floats(read(halves + (message * stride >> 1) + start, index, inside, WHOLE)) * weight
        if skip is None:
            total += added
        else:
            total = tl.where(message == skip, total, total + added)
    if own is not None:
        total = sound(total, flag, own)
    write(out + start, index, total, inside, WHOLE)


@kernel(do_not_specialize=["state", "numel"])
def _round(values, out, state: tl.int64, numel):
    if (tl.program_id(0) + 1).to(tl.int64) * _TILE <= numel:
        _round_tile(values, out, state, numel, True)
    else:
        _round_tile(values, out, state, numel, False)


@triton.jit
def _round_tile(values, out, state, numel, WHOLE: tl.constexpr):
    start, index, inside = _indices(tl.program_id(0), numel)
    small = tl.maximum(tl.minimum(read(values + start, index, inside, WHOLE), _LARGEST), -_LARGEST)
    word = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    bits = small.to(tl.int32, bitcast=True) + random16(state, word)
    write(out + start, index, (bits >> 16).to(tl.int16), inside, WHOLE)


@triton.jit
def _indices(tile, numel):
    """Return a tile's first element, its elements relative to that, ``[_ROWS, 4]``, and which of them exist."""
    start = tile.to(tl.int64) * _TILE
    index = tl.arange(0, _ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return start, index, index < tl.minimum(numel - start, _TILE).to(tl.int32)


@triton.jit
def halved(numbers, TYPE: tl.constexpr):
    """Return float32 numbers as float16, bfloat16 (as int16) or float32, rounded to the nearest, ties to even."""
    if tl.int16 == TYPE:
        bits = numbers.to(tl.int32, bitcast=True)
        half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        half = numbers.to(TYPE)
    return half


@triton.jit
def floats(half):
    """Return the float32 values of what ``halved`` returned."""
    if half.dtype == tl.int16:
        values = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = half.to(tl.float32)
    return values
