"""GPU kernels of ``head.py``: a head is written, or heads are read, by one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.codec import ALIGNMENT
from lightning_compress.core.told import Fold
from lightning_compress.core.told_triton import fold_heads, fold_of, sound
from lightning_compress.exchanges.head import LENGTHS, Head
from lightning_compress.kernels.triton.launch import OPTIONS, kernel

_TILE = 128
"""Bytes of bits per program."""


def write(
    message: Tensor, flag: Tensor, own: Tensor, into: Tensor, index: Tensor, bits: int, dtype: torch.dtype, late: bool
) -> None:
    """See ``Head.write``.

    Args:
        message: uint8 ``[size]``.
        flag: float32 scalar.
        own: uint8, the mask of this rank.
        into: uint8, the mask of any rank; its rows become those of ``own``.
        index: int64 ``[rows]``, which of the mask's rows travel.
        bits: first byte with bits.
        dtype: of the flag in the message.
        late: leave zeros in ``own``, and do not write to ``into``.
    """
    grid = (max(1, triton.cdiv(len(index), 8 * _TILE)),)
    head = message[:ALIGNMENT].view(dtype)
    _write[grid](message[bits:], head, flag, own, into, index, len(index), late, _TILE, **OPTIONS)


def read(
    messages: Tensor, flag: Tensor, own: Tensor, into: Tensor, index: Tensor, bits: int, dtype: torch.dtype
) -> None:
    """See ``Head.read``: add ``messages``, uint8 ``[M, size]``, to ``flag``, and their bits to the mask ``into``.

    Unless that is ``own``, the rows of ``own`` are zeros afterwards.
    """
    grid = (max(1, triton.cdiv(len(index), 8 * _TILE)),)
    head = (messages[0] if len(messages) == 1 else messages[:, :ALIGNMENT]).view(dtype)
    strides = messages.stride(0), messages.stride(0) // dtype.itemsize
    shape = len(messages), into is own, _TILE
    _read[grid](messages[:, bits:], head, *strides, flag, own, into, index, len(index), *shape, **OPTIONS)


def bits_of(heads: Sequence[Head], device: torch.device) -> Tensor:
    """Return the rows of several heads, int32 ``[heads, 1 + most]``: how many, then which of the mask's rows."""
    most = max((len(head.rows) for head in heads), default=0)
    rows = [[len(head.rows), *head.rows, *[0] * (most - len(head.rows))] for head in heads]
    return torch.tensor(rows, dtype=torch.int32).to(device)


def tiles_of(spans: Sequence[slice], device: torch.device) -> Tensor:
    """Return slices of a vector, cut to at most ``SUMS`` elements: int64 ``[tiles, 2]``, starts and lengths."""
    tiles = [(start, min(SUMS, span.stop - start)) for span in spans for start in range(span.start, span.stop, SUMS)]
    return torch.tensor(tiles, dtype=torch.int64).view(-1, 2).to(device)


def write_all(messages: Tensor, own_sum: Tensor, flag: Tensor, own: Tensor, rows: Tensor, rank: int) -> None:
    """Write the heads of the messages to all owners, and in place of that to itself the head of the own sum.

    Args:
        messages: uint8 ``[W, size]``.
        own_sum: uint8 ``[size]``, the message with the sum of the own shard.
        flag: float32 scalar.
        own: uint8, the mask of this rank.
        rows: ``bits_of`` each shard.
        rank: of this process.
    """
    inputs = messages, messages.stride(0), own_sum, flag, own, rows, rows.stride(0), rank
    _write_all[(len(messages),)](*inputs, _steps(rows.shape[1] - 1), LENGTHS, _TILE, **OPTIONS)


def fold(received: Tensor, told: Fold, vector: Tensor, tiles: Tensor) -> None:
    """Add what the heads of received messages say to the head of the own sum, and find sums that are not finite.

    Args:
        received: uint8 ``[W, size]``; this rank's row is ignored.
        told: see ``Fold``.
        vector: float32; sums that are not finite become 0.
        tiles: int64 ``[tiles, 2]``, starts and lengths of at most ``SUMS`` elements of the own shard.
    """
    folded, constants = fold_of(told, received)
    inputs = received, received.stride(0), *folded, vector, tiles, len(tiles)
    _fold[(max(1, len(tiles)),)](*inputs, *constants, SUMS, **OPTIONS)


def read_all(received: Tensor, flag: Tensor, masks: tuple[Tensor, Tensor], rows: Tensor) -> None:
    """Read the heads of all owners' sums.

    Args:
        received: uint8 ``[W, size]``.
        flag: float32 scalar, 0.0 or NaN; becomes NaN if a flag is.
        masks: uint8, of this rank, which becomes zeros, and of any rank, which was zeros.
        rows: ``bits_of`` each shard.
    """
    inputs = received, received.stride(0), flag, *masks, rows, rows.stride(0)
    _read_all[(len(received),)](*inputs, _steps(rows.shape[1] - 1), LENGTHS, _TILE, **OPTIONS)


def _steps(count: int) -> int:
    """Return how often a program has to load bits to see ``count`` rows."""
    return triton.cdiv(count, 8 * _TILE)  # type: ignore[no-any-return]


SUMS = 2048
"""Elements of a shard that a program of ``fold`` looks at."""


@triton.jit
def _rows(rows, first, count, TILE: tl.constexpr):
    """Return the bytes from ``first`` on, the mask's rows of their bits, and which of these exist."""
    byte = first + tl.arange(0, TILE)
    bit = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    return byte, tl.load(rows + 1 + bit, mask=bit < count, other=0), bit < count


@kernel(do_not_specialize=["rank"])
def _write_all(
    messages, stride: tl.int64, own_sum, flag, own, rows, step: tl.int64, rank,
    STEPS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    peer = tl.program_id(0)
    message = messages + peer * stride
    if peer == rank:
        message = own_sum
    tl.store(message.to(tl.pointer_type(tl.float32)), tl.load(flag))
    rows += peer * step
    count = tl.load(rows)
    for turn in range(STEPS):
        byte, place, there = _rows(rows, turn * TILE, count, TILE)
        used = tl.load(own + place, mask=there, other=0).to(tl.int32) << tl.arange(0, 8)[None, :]
        tl.store(message + BITS + byte, tl.sum(used, axis=1).to(tl.uint8), mask=byte * 8 < count)


@kernel(do_not_specialize=["rank", "marked", "count"])
def _fold(
    received, stride: tl.int64, rank, own, flag, mask, marked, vector, tiles, count,
    MESSAGES: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, CLEARS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    if number < count:
        tile = tiles + number.to(tl.int64) * 2
        at = tl.load(tile) + tl.arange(0, SUMS)
        inside = tl.arange(0, SUMS) < tl.load(tile + 1)
        tl.store(vector + at, sound(tl.load(vector + at, mask=inside, other=0.0), flag, own), mask=inside)
    if number == 0:
        fold_heads(received, stride, rank, own, flag, mask, marked, MESSAGES, WIDTH, BITS, BYTES, CLEARS)


@kernel
def _read_all(
    received, stride: tl.int64, flag, own, any_rank, rows, step: tl.int64,
    STEPS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    peer = tl.program_id(0)
    message = received + peer * stride
    told = tl.load(message.to(tl.pointer_type(tl.float32))) * 0.0
    if told != 0.0:  # True for NaN
        tl.store(flag, told)
    rows += peer * step
    count = tl.load(rows)
    for turn in range(STEPS):
        byte, place, there = _rows(rows, turn * TILE, count, TILE)
        packed = tl.load(message + BITS + byte, mask=byte * 8 < count, other=0).to(tl.int32)
        used = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
        tl.store(any_rank + place, used.to(tl.uint8), mask=there & (used != 0))
        tl.store(own + place, tl.zeros([TILE, 8], tl.uint8), mask=there)


@kernel(do_not_specialize=["count"])
def _write(bits, head, flag, own, into, index, count, LATE: tl.constexpr, TILE: tl.constexpr):
    byte = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    place = tl.load(index + row, mask=row < count, other=0)
    used = tl.load(own + place, mask=row < count, other=0)
    if LATE:
        tl.debug_barrier()  # another thread may store than loaded
        tl.store(own + place, tl.zeros([TILE, 8], tl.uint8), mask=row < count)
    else:
        tl.store(into + place, used, mask=row < count)
    packed = tl.sum(used.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte * 8 < count)
    if tl.program_id(0) == 0:
        tl.store(head, tl.load(flag).to(head.dtype.element_ty))


@kernel(do_not_specialize=["count"])
def _read(
    bits, head, stride: tl.int64, step: tl.int64, flag, own, into, index, count,
    MESSAGES: tl.constexpr, SUMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    place = tl.load(index + row, mask=row < count, other=0)
    used = tl.load(into + place, mask=row < count, other=0).to(tl.int32)
    total = tl.zeros([], tl.float32)
    for message in range(MESSAGES):
        packed = tl.load(bits + message * stride + byte, mask=byte * 8 < count, other=0).to(tl.int32)
        used |= (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
        total += tl.load(head + message * step).to(tl.float32) * 0.0
    tl.store(into + place, used.to(tl.uint8), mask=row < count)
    if not SUMS:
        tl.store(own + place, tl.zeros([TILE, 8], tl.uint8), mask=row < count)
    if tl.program_id(0) == 0 and total != 0.0:  # True for NaN
        tl.store(flag, total)
