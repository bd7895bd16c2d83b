"""GPU template of codecs that send one or two numbers per block and a code of a few bits per element.

A codec supplies what is done with blocks in registers. Reading, writing and packing are done here. A row of a tile is a
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.codec import Shard, Shards
from lightning_compress.codecs.packing.planes import code_bytes
from lightning_compress.codecs.packing.planes_triton import later_planes, read_codes, write_codes
from lightning_compress.core.random import Stream, word_state
from lightning_compress.core.source import Source
from lightning_compress.core.told import Fold
from lightning_compress.core.told_triton import fold_heads, fold_of, sound
from lightning_compress.kernels.triton.launch import (
    OPTIONS,
    clear,
    float_view,
    indices,
    kernel,
    read,
    read_sum,
    width_of,
    write,
)
from lightning_compress.kernels.triton.random_bits import shard_state, signed

LONGEST = 8192
"""Largest number of elements of a block, because one program holds it in registers."""


@dataclass(frozen=True)
class BlockCoder:
    """Encodes and decodes; see ``Kernel``.

    A message is ``head`` bytes of the codec, the first value of every block, the second value of every block, as
    float32, zeros, the codes in planes, and zeros.

    Args:
        encode_tile: gets numbers ``[ROWS, WIDTH]``, which of them exist, the rows' block indices, the number of
            elements, the state and the offset of the random bits, pointers to the message and to ``extra``, ``BLOCK``,
            ``BITS`` and ``SETTING``. Returns both values of each row, the codes (int32), and the decoded numbers.
        decode_tile: gets both values of each row, the codes, the weight, a pointer to the message, ``BITS`` and
            ``SETTING``. Returns the decoded numbers times the weight.
        block: elements that share values, at most ``LONGEST``; a multiple of 8.
        bits: bits of a code.
        values: values per block that are sent, 1 (only the first) or 2.
        body: first byte of the codes in the message.
        setting: constants of the codec, passed on as ``SETTING``.
        tile: least number of elements of a program. A program handles several blocks if they are shorter.
        each: elements that a thread holds.
        warps: least number of warps of a program.
        head: bytes before the values, a multiple of 4.
        extra: another tensor for ``encode_tile``.
    """

    encode_tile: Any
    decode_tile: Any
    block: int
    bits: int
    values: int
    body: int
    setting: Any
    tile: int
    each: int = 32
    warps: int = 1
    head: int = 0
    extra: Tensor | None = None

    def encode(self, source: Source, rest: Tensor | None, message: Tensor, stream: Stream) -> None:
        """See ``Kernel``."""
        vectors, *constants = source.pointers(rest)
        numel = len(vectors[0])
        grid, count, shape, options = self._launch(numel)
        header, used = self.head + 4 * self.values * count, self.body + code_bytes(numel, self.bits)
        parts = message, float_view(message, self.head, self.values * count), message[self.body :]
        gaps = message[header:], self.body - header, message[used:], len(message) - used
        numbers = *later_planes(numel, self.bits), numel, count
        random = signed(word_state(stream.key, 0)), stream.offset or None
        inputs = *vectors, *parts, *gaps, *numbers, *random, self.extra
        _encode[grid](*inputs, self.encode_tile, *shape, *constants, **options)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        grid, count, shape, options = self._launch(len(out))
        header, codes = float_view(messages, 0, self.head // 4 + self.values * count), messages[:, self.body :]
        parts = header, header.stride(0), codes, codes.stride(0), *later_planes(len(out), self.bits)
        inputs = *parts, out, weight, len(out), count
        _decode[grid](*inputs, self.decode_tile, *shape, self.head // 4, accumulate, len(messages), **options)

    def shards(self, shards: Sequence[Shard], device: torch.device) -> Shards | None:
        """See ``ShardCoder``."""
        alike = [isinstance(each.coder, BlockCoder) and replace(each.coder, body=0) for each in shards]
        if self.extra is not None or any(each != replace(self, body=0) for each in alike):
            return None
        rows = []
        for shard in shards:
            (grid,), count, _, _ = self._launch(shard.numel)
            body = cast(BlockCoder, shard.coder).body
            used = body + code_bytes(shard.numel, self.bits)
            place = shard.at, body, used, shard.size, *later_planes(shard.numel, self.bits)
            rows += [(tile, shard.start, shard.numel, count, *place, shard.peer, shard.number) for tile in range(grid)]
        return Shards.of(rows, shards, device)

    def encode_shards(self, source: Source, rest: Tensor | None, messages: Tensor, shards: Shards, key: int) -> None:
        """See ``ShardCoder``."""
        vectors, *constants = source.pointers(rest)
        _, _, shape, options = self._launch(self.block)
        inputs = *vectors, messages, shards.table, signed(key), self.encode_tile
        grid = (len(shards.table),)
        _encode_shards[grid](*inputs, *shape, self.head, *constants, shards.aligned, **options)

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor, weight: float, accumulate: bool, fold: Fold | None
    ) -> None:
        """See ``ShardCoder``."""
        _, _, shape, options = self._launch(self.block)
        folded, constants = fold_of(fold, messages)
        inputs = messages, messages.stride(0), shards.table, out, weight, *folded, self.decode_tile, *shape
        _decode_shards[(len(shards.table),)](*inputs, self.head, accumulate, *constants, shards.aligned, **options)

    def _launch(self, numel: int) -> tuple[tuple[int], int, tuple[Any, ...], dict[str, Any]]:
        """Return the grid, the number of blocks, the constants of a tile, and launch options."""
        count, width = -(-numel // self.block), width_of(self.block)
        rows = max(1, self.tile // width)
        options = OPTIONS | {"num_warps": max(self.warps, rows * width // (32 * self.each))}
        shape = self.block, width, rows, self.bits, self.values, self.setting
        return (triton.cdiv(count, rows),), count, shape, options


@kernel(do_not_specialize=["padding", "rest", "count", "state", "move"])
def _encode(
    first, second, vector, message, header, body, gap, padding, end, rest, middle, last, numel: tl.int64, count,
    state: tl.int64, move, extra,
    ENCODE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    VALUES: tl.constexpr, SETTING: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    inputs = number, first, second, vector, message, header, body, middle, last, numel, count, state, move, extra
    if BLOCK == WIDTH and (number + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _encode_tile(*inputs, ENCODE, BLOCK, WIDTH, ROWS, BITS, VALUES, SETTING, SUM, KEEP, True)
    else:
        _encode_tile(*inputs, ENCODE, BLOCK, WIDTH, ROWS, BITS, VALUES, SETTING, SUM, KEEP, False)
    if number == 0:
        clear(gap, padding)
        clear(end, rest)


_COLUMNS = tl.constexpr(12)


@triton.jit
def _shard(table):
    """Return a program's row: tile, start, numel, count, and where its message, codes, their end and its end are.

    A division and a product tell the compiler what a number is a multiple of; ``tl.multiple_of`` does not suffice.
    """
    row = table + tl.program_id(0).to(tl.int64) * _COLUMNS
    place = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    at, body = place[0] // 16 * 16, place[1] // 16 * 16
    return tl.load(row).to(tl.int32), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), at, body, place[2], place[3]


@kernel(do_not_specialize=["key"])
def _encode_shards(
    first, second, vector, messages, table, key: tl.int64,
    ENCODE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    VALUES: tl.constexpr, SETTING: tl.constexpr, HEAD: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    number, start, numel, count, at, body, used, size = _shard(table)
    if ALIGNED:
        start = start // 4 * 4
    row = table + tl.program_id(0).to(tl.int64) * _COLUMNS
    middle, last = tl.load(row + 8), tl.load(row + 9)
    state = shard_state(key, tl.load(row + 10), tl.load(row + 11))
    message = messages + at
    header = (message + HEAD).to(tl.pointer_type(tl.float32))
    values = number, first + start, second + start, vector + start
    inputs = message, header, message + body, middle, last, numel, count, state, None, None
    if BLOCK == WIDTH and (number + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _encode_tile(*values, *inputs, ENCODE, BLOCK, WIDTH, ROWS, BITS, VALUES, SETTING, SUM, KEEP, True)
    else:
        _encode_tile(*values, *inputs, ENCODE, BLOCK, WIDTH, ROWS, BITS, VALUES, SETTING, SUM, KEEP, False)
    if number == 0:
        ended = HEAD + 4 * VALUES * count
        clear(message + ended, body - ended)
        clear(message + used, size - used)


@kernel(do_not_specialize=["rank", "marked"])
def _decode_shards(
    messages, stride: tl.int64, table, out, weight, rank, own, flag, mask, marked,
    DECODE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    VALUES: tl.constexpr, SETTING: tl.constexpr, HEAD: tl.constexpr, ADD: tl.constexpr, MESSAGES: tl.constexpr,
    WIDTH_OF: tl.constexpr, HEAD_BITS: tl.constexpr, HEAD_BYTES: tl.constexpr, CLEARS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    number, start, numel, count, at, body, _used, _size = _shard(table)
    if ALIGNED:
        start = start // 4 * 4
    row = table + tl.program_id(0).to(tl.int64) * _COLUMNS
    middle, last = tl.load(row + 8), tl.load(row + 9)
    message = messages + at
    header = message.to(tl.pointer_type(tl.float32))
    body_of, step, target = message + body, stride // 4, out + start
    inputs = number, rank, header, step, body_of, stride, middle, last, target, weight, numel, count, flag, own
    if BLOCK == WIDTH and (number + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _decode_tile(
            *inputs, WIDTH_OF > 0, DECODE, BLOCK, WIDTH, ROWS, BITS, VALUES, SETTING, HEAD // 4, ADD, MESSAGES, True
        )
    else:
        _decode_tile(
            *inputs, WIDTH_OF > 0, DECODE, BLOCK, WIDTH, ROWS, BITS, VALUES, SETTING, HEAD // 4, ADD, MESSAGES, False
        )
    if WIDTH_OF:  # noqa: SIM102  # known when the kernel is compiled
        if tl.program_id(0) == 0:
            told = rank, own, flag, mask, marked
            fold_heads(messages, stride, *told, MESSAGES, WIDTH_OF, HEAD_BITS, HEAD_BYTES, CLEARS)


@triton.jit
def _encode_tile(
    tile, first, second, vector, message, header, body, middle, last, numel, count, state, move, extra,
    ENCODE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    VALUES: tl.constexpr, SETTING: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    number = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index, inside = indices(number, numel, BLOCK, WIDTH)
    numbers = read_sum(first, second, index, inside, SUM, WHOLE)
    one, other, codes, sent = ENCODE(numbers, inside, number, numel, state, move, message, extra, BLOCK, BITS, SETTING)
    tl.store(header + number, one, mask=number < count)
    if VALUES == 2:
        tl.store(header + count + number, other, mask=number < count)
    if KEEP:
        write(vector, index, numbers - sent, inside, WHOLE)
    if not WHOLE:
        codes = tl.where(inside, codes, 0)
    write_codes(codes, body, middle, last, number * BLOCK, numel, BLOCK, BITS, WHOLE)


@kernel(do_not_specialize=["count"])
def _decode(
    header, step: tl.int64, body, stride: tl.int64, middle, last, out, weight, numel: tl.int64, count,
    DECODE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    VALUES: tl.constexpr, SETTING: tl.constexpr, HEAD: tl.constexpr, ADD: tl.constexpr, MESSAGES: tl.constexpr,
):  # fmt: skip
    inputs = tl.program_id(0), None, header, step, body, stride, middle, last, out, weight, numel, count, None, None
    if BLOCK == WIDTH and (tl.program_id(0) + 1).to(tl.int64) * (ROWS * BLOCK) <= numel:
        _decode_tile(*inputs, False, DECODE, BLOCK, WIDTH, ROWS, BITS, VALUES, SETTING, HEAD, ADD, MESSAGES, True)
    else:
        _decode_tile(*inputs, False, DECODE, BLOCK, WIDTH, ROWS, BITS, VALUES, SETTING, HEAD, ADD, MESSAGES, False)


@triton.jit
def _decode_tile(
    tile, skip, header, step, body, stride, middle, last, out, weight, numel, count, flag, own, FOLD: tl.constexpr,
    DECODE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    VALUES: tl.constexpr, SETTING: tl.constexpr, HEAD: tl.constexpr, ADD: tl.constexpr, MESSAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    number = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index, inside = indices(number, numel, BLOCK, WIDTH)
    total = read(out, index, inside, WHOLE) if ADD else tl.zeros([ROWS, WIDTH], tl.float32)
    for message in range(MESSAGES):
        row = header + message * step
        one = tl.load(row + HEAD + number, mask=number < count, other=0.0)
        other = one
        if VALUES == 2:
            other = tl.load(row + HEAD + count + number, mask=number < count, other=0.0)
        packed = body + message * stride
        codes = read_codes(packed, middle, last, number * BLOCK, numel, BLOCK, WIDTH, BITS, WHOLE)
        decoded = DECODE(one, other, codes, weight, row, BITS, SETTING)
        if skip is None:
            total += decoded
        else:
            total = tl.where(message == skip, total, total + decoded)
    if FOLD:
        total = sound(total, flag, own)
    write(out, index, total, inside, WHOLE)
