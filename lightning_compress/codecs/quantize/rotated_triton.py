"""GPU kernels of ``rotated.py``, with a run of blocks in registers. Bit-identical to its tensor operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.codec import Shard, Shards
from lightning_compress.codecs.packing.planes_triton import later_planes, read_codes, write_codes
from lightning_compress.codecs.quantize.levels_triton import fit, levels_of, round_levels, step_of
from lightning_compress.core.random import Stream, word_state
from lightning_compress.core.source import Source
from lightning_compress.core.told import Fold
from lightning_compress.core.told_triton import fold_heads, fold_of, sound
from lightning_compress.core.workspace import scratch
from lightning_compress.kernels.triton.launch import (
    OPTIONS,
    clear,
    float_view,
    kernel,
    read,
    read_sum,
    write,
)
from lightning_compress.kernels.triton.random_bits import random_bits, shard_state, signed


@triton.jit
def transform(tile):
    """Return ``H x`` for every column x of ``tile``, float32 ``[ROWS, COLUMNS]``, both powers of two."""
    return _steps(tile, 1)


@triton.jit
def _steps(tile, DISTANCE: tl.constexpr):
    """Do the steps from this distance on: ``a, b`` become ``a + b, (a + b) - 2 b``.

    A sum of two numbers is a single addition, whether they are in one thread or in two, so it is always rounded alike.
    """
    ROWS: tl.constexpr = tile.shape[0]
    RUN: tl.constexpr = DISTANCE * tile.shape[1]
    if DISTANCE < ROWS:
        pairs = tl.reshape(tile, [ROWS // (2 * DISTANCE), 2, RUN])
        total = tl.sum(pairs, axis=1, keep_dims=True)
        lower = (tl.arange(0, 2) == 1)[None, :, None]
        other = tl.fma(pairs, tl.full(pairs.shape, -2.0, tl.float32), total)  # multiplying by 2 is exact
        tile = tl.reshape(tl.where(lower, other, total), tile.shape)
        tile = _steps(tile, 2 * DISTANCE)
    return tile


LONGEST = 1024
"""Largest number of elements of a block, because one program holds a run in registers."""
RUN = 16
"""Blocks of a run. The last run may have fewer."""
_RUN = tl.constexpr(RUN)
_LIMIT = tl.constexpr(2.0**110)
_TILE = 2048
"""Elements that a program handles, but at least 8 blocks: a row of 8 is a memory sector of 32 bytes."""
_EACH = 64
"""Elements that a thread holds: one warp then handles blocks of 256 without other warps. For blocks of ``LONGEST`` it
is half of that, because registers would spill."""
_WARPS_TO_ENCODE, _WARPS_TO_DECODE = 8, 16
"""Largest number of warps for the last run, a single program that the device waits for. Chosen to avoid spills."""


@dataclass(frozen=True)
class Rotation:
    """Encodes and decodes messages with one norm per block and one code per coefficient; see ``Kernel``.

    Args:
        signs: float32 ``[block]``, 1 or -1. ``block`` is a power of two from 8 to ``LONGEST``.
        rest: float32 ``[RUN * block]``; scratch.
        bits: bits of a code, 2 to 8.
        body: first byte of the codes in the message.
    """

    signs: Tensor
    rest: Tensor
    bits: int
    body: int

    def encode(self, source: Source, rest: Tensor | None, message: Tensor, stream: Stream) -> None:
        """See ``Kernel``."""
        block, bits, body = len(self.signs), self.bits, self.body
        vectors, *constants = source.pointers(rest)
        numel = len(vectors[0])
        count = -(-numel // block)
        header = float_view(message, 0, count)
        parts = header, message[4 * count :], body - 4 * count, message[body:], *later_planes(count * block, bits)
        random = signed(word_state(stream.key, 0)), stream.offset or None
        inputs = *vectors, self.signs, self.rest, *parts, numel, count, *random
        for grid, shape, whole, options in _launches(numel, block, _WARPS_TO_ENCODE):
            _encode[grid](*inputs, *shape, block, bits, *constants, whole, **options)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        block, bits = len(self.signs), self.bits
        count = -(-len(out) // block)
        header, codes = float_view(messages, 0, count), messages[:, self.body :]
        parts = header, header.stride(0), codes, codes.stride(0), *later_planes(count * block, bits)
        inputs = *parts, out, self.signs, self.rest, weight, len(out), count
        for grid, shape, whole, options in _launches(len(out), block, _WARPS_TO_DECODE):
            _decode[grid](*inputs, *shape, block, bits, accumulate, len(messages), whole, **options)

    def shards(self, shards: Sequence[Shard], device: torch.device) -> Shards | None:
        """See ``ShardCoder``."""
        block, bits = len(self.signs), self.bits
        if any(not isinstance(each.coder, Rotation) or len(each.coder.signs) != block for each in shards):
            return None
        rows = []
        for slot, shard in enumerate(shards):
            count = -(-shard.numel // block)
            body = cast(Rotation, shard.coder).body
            place = shard.start, shard.numel, count, shard.at, body, *later_planes(count * block, bits)
            for (programs,), (begin, columns), whole, _ in _launches(shard.numel, block, _WARPS_TO_ENCODE):
                parts = RUN // columns
                tiles = [(begin + tile // parts, tile % parts * columns, whole) for tile in range(programs)]
                rows += [(*tile, slot, *place, shard.peer, shard.number) for tile in tiles]
        return Shards.of(rows, shards, device)

    def encode_shards(self, source: Source, rest: Tensor | None, messages: Tensor, shards: Shards, key: int) -> None:
        """See ``ShardCoder``."""
        vectors, *both = source.pointers(rest)
        inputs = *vectors, messages, shards.table, self.signs, self._rests(shards), signed(key)
        constants = _columns(len(self.signs)), len(self.signs), self.bits, *both, shards.aligned
        _encode_shards[(len(shards.table),)](*inputs, *constants, **OPTIONS | {"num_warps": 8})  # fewer would spill

    def decode_shards(
        self, messages: Tensor, shards: Shards, out: Tensor, weight: float, accumulate: bool, fold: Fold | None
    ) -> None:
        """See ``ShardCoder``."""
        folded, numbers = fold_of(fold, messages)
        inputs = messages, messages.stride(0), shards.table, out, self.signs, self._rests(shards), weight, *folded
        constants = _columns(len(self.signs)), len(self.signs), self.bits, accumulate, *numbers, shards.aligned
        options = OPTIONS | {"num_warps": 8 if fold else 4}  # fewer would spill
        _decode_shards[(len(shards.table),)](*inputs, *constants, **options)

    def _rests(self, shards: Shards) -> Tensor:
        """Return scratch for the last run of each shard."""
        return scratch("rotated rests", shards.slots * RUN * len(self.signs), torch.float32, self.signs.device)


def _columns(block: int) -> int:
    """Return the blocks of a whole run that a program handles."""
    return min(RUN, max(8, _TILE // block))


def _launches(numel: int, block: int, most: int) -> Iterator[tuple[tuple[int], tuple[int, int], bool, dict[str, Any]]]:
    """Yield launches of whole runs and of the last run: grid, (first run, columns), whether they are whole, options."""
    whole, rest = divmod(numel, block * RUN)
    columns = _columns(block)
    per_thread = _EACH if block < LONGEST else _EACH // 2
    if whole:
        yield (whole * RUN // columns,), (0, columns), True, _options(block * columns // (32 * per_thread), 8)
    if rest:
        yield (1,), (whole, RUN), False, _options(block * RUN // 256, most)


def _options(warps: int, most: int) -> dict[str, Any]:
    return OPTIONS | {"num_warps": min(most, max(1, warps))}


@kernel(do_not_specialize=["padding", "count", "start", "move", "begin"])
def _encode(
    first, second, vector, signs, rest, header, gap, padding, body, middle, last, numel: tl.int64, count,
    start: tl.int64, move, begin,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    run, column = _tile(begin, COLUMNS)
    inputs = first, second, vector, signs, rest, header, body, middle, last, numel, count, start, move
    _encode_run(run, column, *inputs, COLUMNS, BLOCK, BITS, SUM, KEEP, WHOLE)
    if begin + tl.program_id(0) == 0:
        clear(gap, padding)


_FIELDS = tl.constexpr(13)


@triton.jit
def _shard(table):
    """Return a program's row: run, column, whether it is whole, slot, start, numel, count; the message, its codes."""
    row = table + tl.program_id(0).to(tl.int64) * _FIELDS
    run, column, whole, slot = tl.load(row).to(tl.int32), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    at, body = tl.load(row + 7) // 16 * 16, tl.load(row + 8) // 16 * 16  # says that they are multiples
    return run, column, whole, slot, tl.load(row + 4), tl.load(row + 5), tl.load(row + 6).to(tl.int32), at, body


@kernel(do_not_specialize=["key"])
def _encode_shards(
    first, second, vector, messages, table, signs, rests, key: tl.int64,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    run, column, whole, slot, start, numel, count, at, body = _shard(table)
    row = table + tl.program_id(0).to(tl.int64) * _FIELDS
    if ALIGNED:
        start = start // 4 * 4
    state = shard_state(key, tl.load(row + 11), tl.load(row + 12))
    header, rest = (messages + at).to(tl.pointer_type(tl.float32)), rests + slot * (_RUN * BLOCK)
    places = first + start, second + start, vector + start, signs, rest, header, messages + at + body
    inputs = tl.load(row + 9), tl.load(row + 10), numel, count, state, None
    if whole != 0:
        _encode_run(run, column, *places, *inputs, COLUMNS, BLOCK, BITS, SUM, KEEP, True)
    else:
        _encode_run(run, column, *places, *inputs, _RUN, BLOCK, BITS, SUM, KEEP, False)
    if run + column == 0:
        clear(messages + at + 4 * count, body - 4 * count)


@triton.jit
def _encode_run(
    run, first_column, first, second, vector, signs, rest, header, body, middle, last, numel, count, start, move,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    top: tl.constexpr = 2 ** (BITS - 1) - 0.5
    row, block, rows, index = _indices(run, first_column, BLOCK, COLUMNS)
    columns = count - run * _RUN
    numbers = read_sum(first, second, index, index < numel, SUM, WHOLE)
    coefficients = _to_matrix(numbers, columns, rest, WHOLE) * (tl.load(signs + row) * (1 / BLOCK))[:, None]
    coefficients = transform(coefficients)
    norm, factor = fit(tl.max(tl.abs(coefficients), axis=0), top, _LIMIT)
    tl.store(header + block, norm, mask=block < count)
    scaled = _from_matrix(coefficients * factor[None, :], columns, rest, WHOLE)
    level = round_levels(scaled, random_bits(start, rows, move, COLUMNS), 0.5)
    write_codes(level.to(tl.int32), body, middle, last, rows, count.to(tl.int64) * BLOCK, COLUMNS, BITS, WHOLE)
    if KEEP:
        sent = transform(_to_matrix(level + 0.5, columns, rest, WHOLE) * step_of(norm, top)[None, :])
        sent = _from_matrix(sent * tl.load(signs + row)[:, None], columns, rest, WHOLE)
        write(vector, index, numbers - sent, index < numel, WHOLE)


@kernel(do_not_specialize=["count", "begin"])
def _decode(
    header, step: tl.int64, body, stride: tl.int64, middle, last, out, signs, rest, weight, numel: tl.int64,
    count, begin,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, ADD: tl.constexpr, MESSAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    run, column = _tile(begin, COLUMNS)
    inputs = header, step, body, stride, middle, last, out, signs, rest, weight, numel, count, None, None, None
    _decode_run(run, column, *inputs, False, COLUMNS, BLOCK, BITS, ADD, MESSAGES, WHOLE)


@kernel(do_not_specialize=["rank", "marked"])
def _decode_shards(
    messages, stride: tl.int64, table, out, signs, rests, weight, rank, own, flag, mask, marked,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, ADD: tl.constexpr, MESSAGES: tl.constexpr,
    WIDTH: tl.constexpr, HEAD_BITS: tl.constexpr, HEAD_BYTES: tl.constexpr, CLEARS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    run, column, whole, slot, start, numel, count, at, body = _shard(table)
    row = table + tl.program_id(0).to(tl.int64) * _FIELDS
    if ALIGNED:
        start = start // 4 * 4
    header, rest = (messages + at).to(tl.pointer_type(tl.float32)), rests + slot * (_RUN * BLOCK)
    places = header, stride // 4, messages + at + body, stride, tl.load(row + 9), tl.load(row + 10), out + start
    inputs = signs, rest, weight, numel, count, rank, flag, own
    if whole != 0:
        _decode_run(run, column, *places, *inputs, WIDTH > 0, COLUMNS, BLOCK, BITS, ADD, MESSAGES, True)
    else:
        _decode_run(run, column, *places, *inputs, WIDTH > 0, _RUN, BLOCK, BITS, ADD, MESSAGES, False)
    if WIDTH:  # noqa: SIM102  # known when the kernel is compiled
        if tl.program_id(0) == 0:
            fold_heads(messages, stride, rank, own, flag, mask, marked, MESSAGES, WIDTH, HEAD_BITS, HEAD_BYTES, CLEARS)


@triton.jit
def _decode_run(
    run, first_column, header, step, body, stride, middle, last, out, signs, rest, weight, numel, count,
    rank, flag, own, FOLD: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, ADD: tl.constexpr, MESSAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    row, block, rows, index = _indices(run, first_column, BLOCK, COLUMNS)
    columns = count - run * _RUN
    block = block[None, :]
    if not WHOLE:
        block = run * _RUN + _index(BLOCK) % columns
    inputs = block, rows, header, step, body, stride, middle, last, weight, count
    total, later = tl.zeros([BLOCK, COLUMNS], tl.float32), tl.zeros([BLOCK, COLUMNS], tl.float32)
    for message in range(MESSAGES):
        decoded = _coefficients(message, *inputs, COLUMNS, BITS, WHOLE)
        if FOLD:
            later = tl.where(message > rank, later + decoded, later)
            total = tl.where(message < rank, total + decoded, total)
        else:
            total += decoded
    sums = _unrotated(total, columns, signs, row, rest, WHOLE)
    if ADD:
        before = read(out, index, index < numel, WHOLE)
        sums += before
        if FOLD:  # the messages before the own one are added on their own, as on a CPU
            if rank == 0:
                sums = before
            if rank < MESSAGES - 1:
                sums += _unrotated(later, columns, signs, row, rest, WHOLE)
            sums = sound(sums, flag, own)
    write(out, index, sums, index < numel, WHOLE)


@triton.jit
def _coefficients(
    message, block, rows, header, step, body, stride, middle, last, weight, count,
    COLUMNS: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return a message's coefficients of a run, times ``weight``."""
    norm = tl.load(header + message * step + block, mask=block < count, other=0.0)
    scale = step_of(norm, 2 ** (BITS - 1) - 0.5) * weight
    numel = count.to(tl.int64) * rows.shape[0]
    codes = read_codes(body + message * stride, middle, last, rows, numel, COLUMNS, COLUMNS, BITS, WHOLE)
    return (levels_of(codes, BITS) + 0.5) * scale


@triton.jit
def _unrotated(total, columns, signs, row, rest, WHOLE: tl.constexpr):
    """Return the elements of blocks from their coefficients."""
    sums = transform(_to_matrix(total, columns, rest, WHOLE)) * tl.load(signs + row)[:, None]
    return _from_matrix(sums, columns, rest, WHOLE)


@triton.jit
def _tile(begin, COLUMNS: tl.constexpr):
    """Return a program's run, and its first column there."""
    parts: tl.constexpr = _RUN // COLUMNS
    return begin + tl.program_id(0) // parts, tl.program_id(0) % parts * COLUMNS


@triton.jit
def _indices(run, first, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile's rows, its block indices, the index of each row's first element, and the indices of all."""
    row, column = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    rows = run.to(tl.int64) * (BLOCK * _RUN) + first + row * _RUN
    return row, run * _RUN + first + column, rows, rows[:, None] + column[None, :]


@triton.jit
def _index(BLOCK: tl.constexpr):
    """Return the indices of a run's elements, ``[BLOCK, _RUN]``."""
    return tl.arange(0, BLOCK)[:, None] * _RUN + tl.arange(0, _RUN)[None, :]


@triton.jit
def _to_matrix(dense, columns, rest, WHOLE: tl.constexpr):
    """Return the matrix whose rows, of ``columns`` elements, follow each other in ``dense``; other columns are 0."""
    if WHOLE:
        matrix = dense
    else:
        index = _index(dense.shape[0])
        dense_index = index // _RUN * columns + index % _RUN
        matrix = tl.where(index % _RUN < columns, _move(dense, rest, index, dense_index), 0.0)
    return matrix


@triton.jit
def _from_matrix(matrix, columns, rest, WHOLE: tl.constexpr):
    """Return the rows one after the other; the inverse of ``_to_matrix``. What follows them is undefined."""
    if WHOLE:
        dense = matrix
    else:
        index = _index(matrix.shape[0])
        dense_index = index // _RUN * columns + index % _RUN
        dense = _move(matrix, rest, tl.where(index % _RUN < columns, dense_index, -1), index)
    return dense


@triton.jit
def _move(tile, rest, there, here):
    """Write a tile to the scratch indices ``there``, except those below 0, and read the indices ``here``."""
    tl.debug_barrier()  # all earlier reads are done
    tl.store(rest + there, tile, mask=there >= 0)
    tl.debug_barrier()
    return tl.load(rest + here)
