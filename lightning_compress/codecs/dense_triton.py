"""GPU kernels of ``dense.py``: one launch for any number of messages. Bit-identical to its tensor operations."""

from __future__ import annotations

from collections.abc import Sequence

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

_TILE = 2048
"""Elements per program."""


class Floats:
    """Copies numbers; see ``Kernel``."""

    def encode(self, source: Source, rest: Tensor | None, message: Tensor, stream: Stream) -> None:
        """See ``Kernel``."""
        numbers, (vectors, *constants) = message.view(torch.float32), source.pointers(rest)
        _encode[_grid(numbers)](*vectors, numbers, len(numbers), *constants, _TILE, **OPTIONS)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        inputs = messages, messages.stride(0), out, weight, len(out)
        _decode[_grid(out)](*inputs, accumulate, len(messages), _TILE, **OPTIONS)

    def shards(self, shards: Sequence[Shard], device: torch.device) -> Shards | None:
        """See ``ShardCoder``."""
        if not all(isinstance(each.coder, Floats) for each in shards):
            return None
        tiles = [(tile, each) for each in shards for tile in range(triton.cdiv(each.numel, _TILE))]
        return Shards.of([(tile, each.start, each.numel, each.at) for tile, each in tiles], shards, device)

    def encode_shards(self, source: Source, rest: Tensor | None, messages: Tensor, shards: Shards, key: int) -> None:
        """See ``ShardCoder``."""
        vectors, *constants = source.pointers(rest)
        _encode_shards[(len(shards.table),)](*vectors, messages, shards.table, *constants, _TILE, **OPTIONS)

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor, weight: float, accumulate: bool, fold: Fold | None
    ) -> None:
        """See ``ShardCoder``."""
        folded, constants = fold_of(fold, messages)
        inputs = messages, messages.stride(0), shards.table, out, weight, *folded
        _decode_shards[(len(shards.table),)](*inputs, accumulate, *constants, _TILE, **OPTIONS)

    def pass_on(self, messages: Tensor, shards: Shards, vector: Tensor, fold: Fold, sent: Shards, keep: bool) -> None:
        """See ``PassingCoder``."""
        folded, constants = fold_of(fold, messages)
        inputs = messages, messages.stride(0), shards.table, sent.table, vector, *folded
        _pass_on[(len(shards.table),)](*inputs, keep, *constants, _TILE, **OPTIONS)


def _grid(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(len(vector), _TILE),)


@kernel(do_not_specialize=["numel"])
def _encode(first, second, vector, numbers, numel, SUM: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr):
    _encode_tile(tl.program_id(0), first, second, vector, numbers, numel, SUM, KEEP, TILE)


@kernel
def _encode_shards(
    first, second, vector, messages, table, SUM: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    tile, start, numel, at = shard(table)
    numbers = (messages + at).to(tl.pointer_type(tl.float32))
    _encode_tile(tile, first + start, second + start, vector + start, numbers, numel, SUM, KEEP, TILE)


@triton.jit
def _encode_tile(
    tile, first, second, vector, numbers, numel, SUM: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    if (tile + 1).to(tl.int64) * TILE <= numel:
        _encode_part(tile, first, second, vector, numbers, numel, SUM, KEEP, TILE, True)
    else:
        _encode_part(tile, first, second, vector, numbers, numel, SUM, KEEP, TILE, False)


@triton.jit
def _encode_part(
    tile, first, second, vector, numbers, numel,
    SUM: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    index, inside = _indices(tile, numel, TILE)
    write(numbers, index, read_sum(first, second, index, inside, SUM, WHOLE), inside, WHOLE)
    if KEEP:
        write(vector, index, tl.zeros([TILE], tl.float32), inside, WHOLE)


@kernel(do_not_specialize=["numel"])
def _decode(
    messages, stride: tl.int64, out, weight, numel, ADD: tl.constexpr, MESSAGES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    index, inside = _indices(tl.program_id(0), numel, TILE)
    total = _decoded(index, inside, None, messages, stride, out, weight, ADD, MESSAGES, TILE)
    write(out, index, total, inside, False)


@kernel(do_not_specialize=["rank", "marked"])
def _decode_shards(
    messages, stride: tl.int64, table, out, weight, rank, own, flag, mask, marked,
    ADD: tl.constexpr, MESSAGES: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    CLEARS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, start, numel, at = shard(table)
    index, inside = _indices(tile, numel, TILE)
    total = _decoded(index, inside, rank, messages + at, stride, out + start, weight, ADD, MESSAGES, TILE)
    if WIDTH:
        total = sound(total, flag, own)
        if tl.program_id(0) == 0:
            fold_heads(messages, stride, rank, own, flag, mask, marked, MESSAGES, WIDTH, BITS, BYTES, CLEARS)
    write(out + start, index, total, inside, False)


@kernel(do_not_specialize=["rank", "marked"])
def _pass_on(
    messages, stride: tl.int64, table, sent, vector, rank, own, flag, mask, marked,
    KEEP: tl.constexpr, MESSAGES: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    CLEARS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, start, numel, at = shard(table)
    _tile, _start, _numel, to = shard(sent)
    index, inside = _indices(tile, numel, TILE)
    total = _decoded(index, inside, rank, messages + at, stride, vector + start, 1.0, True, MESSAGES, TILE)
    write((own + to).to(tl.pointer_type(tl.float32)), index, sound(total, flag, own), inside, False)
    if KEEP:
        write(vector + start, index, tl.zeros([TILE], tl.float32), inside, False)
    if tl.program_id(0) == 0:
        fold_heads(messages, stride, rank, own, flag, mask, marked, MESSAGES, WIDTH, BITS, BYTES, CLEARS)


@triton.jit
def _decoded(
    index, inside, skip, messages, stride, out, weight, ADD: tl.constexpr, MESSAGES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return the weighted sum of a tile over all messages but row ``skip``, None or -1 for none."""
    total = read(out, index, inside, False) if ADD else tl.zeros([TILE], tl.float32)
    factor = (tl.zeros([TILE], tl.float32) + weight).to(tl.float64)
    for message in range(MESSAGES):
        numbers = read((messages + message * stride).to(tl.pointer_type(tl.float32)), index, inside, False)
        # the product is exact in float64, so that it is rounded once, with the sum
        added = (numbers.to(tl.float64) * factor + total.to(tl.float64)).to(tl.float32)
        if skip is None:
            total = added
        else:
            total = tl.where(message == skip, total, added)
    return total


@triton.jit
def _indices(tile, numel, TILE: tl.constexpr):
    index = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    return index, index < numel
