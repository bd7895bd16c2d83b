"""Reading of messages' heads by kernels that have something else to do; see ``told.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.core.told import Fold
from lightning_compress.kernels.triton.launch import width_of

_HEADS = tl.constexpr(1024)
"""Bytes of heads that are read at once."""


@triton.jit
def flag_of(messages, step, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return 0.0, or NaN if the flag of a message is not finite; ``WIDTH`` is a power of two, at least ``COUNT``."""
    number = tl.arange(0, WIDTH)
    flags = (messages + number * step).to(tl.pointer_type(tl.float32))
    return tl.sum(tl.load(flags, mask=number < COUNT, other=0.0) * 0.0, axis=0)


@triton.jit
def is_used(messages, step, bit, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return whether a bit is set in one of ``COUNT`` messages; true for bit -1."""
    number = tl.arange(0, WIDTH)
    found = tl.load(messages + number * step + bit // 8, mask=(number < COUNT) & (bit >= 0), other=0).to(tl.int32)
    return (bit < 0) | (tl.max((found >> (bit % 8).to(tl.int32)) & 1, axis=0) != 0)


def fold_of(fold: Fold | None, messages: Tensor) -> tuple[tuple[int | Tensor, ...], tuple[int, ...]]:
    """Return what a kernel that decodes shards is told for ``fold_heads`` and ``sound``.

    Args:
        fold: None if each shard is decoded once, from where it stands.
        messages: uint8 ``[W, size]``.

    Returns:
        Its arguments ``rank, own, flag, mask, marked`` and its constants ``MESSAGES, WIDTH, BITS, BYTES, CLEARS``;
        without a fold, ``rank`` is -1 and ``WIDTH`` 0.
    """
    if fold is None:
        return (-1, messages, messages, messages, 0), (1, 0, 0, 0, 0)
    given, ranks, marked = (fold.rank, fold.own, fold.flag, fold.mask), len(messages), len(fold.mask)
    return (*given, marked), (ranks, width_of(ranks), fold.bits, fold.bytes, -(-marked // _HEADS.value))


@triton.jit
def _either(one, other):
    return one | other


@triton.jit
def fold_heads(
    messages, stride, rank, own, flag, mask, marked,
    MESSAGES: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, CLEARS: tl.constexpr,
):  # fmt: skip
    """Add what the heads of messages say to the head of the own sum, and clear the mask; see ``Fold``.

    To do it once more changes nothing, so that each section's kernel may do it.
    """
    number = tl.arange(0, WIDTH)
    others = (number < MESSAGES) & (number != rank)
    heads = messages + number * stride
    told = tl.sum(tl.load(heads.to(tl.pointer_type(tl.float32)), mask=others, other=0.0) * 0.0, axis=0)
    if told != 0.0:  # True for NaN
        tl.store(flag, told)
        tl.store(own.to(tl.pointer_type(tl.float32)), told)
    SIZE: tl.constexpr = _HEADS // WIDTH if WIDTH < _HEADS else 1
    for first in range(0, BYTES, SIZE):
        byte = first + tl.arange(0, SIZE)
        theirs = heads[:, None] + (BITS + byte)[None, :]
        bits = tl.load(theirs, mask=others[:, None] & (byte < BYTES)[None, :], other=0).to(tl.int32)
        mine = tl.load(own + BITS + byte, mask=byte < BYTES, other=0).to(tl.int32)
        tl.store(own + BITS + byte, (mine | tl.reduce(bits, 0, _either)).to(tl.uint8), mask=byte < BYTES)
    for turn in range(CLEARS):
        place = turn * _HEADS + tl.arange(0, _HEADS)
        tl.store(mask + place, tl.zeros([_HEADS], tl.uint8), mask=place < marked)


@triton.jit
def sound(sums, flag, own):
    """Return sums, with zeros in place of those that are not finite; then both flags become NaN, see ``Fold``."""
    finite = tl.abs(sums) < float("inf")  # False for NaN
    if tl.min(finite.to(tl.int32), axis=None) == 0:  # every program writes the same
        tl.store(flag, float("nan"))
        tl.store(own.to(tl.pointer_type(tl.float32)), float("nan"))
        sums = tl.where(finite, sums, 0.0)
    return sums


@triton.jit
def arrive(arrived):
    """Return whether this program is the last one to arrive here: what the others stored before is then visible."""
    tl.debug_barrier()  # the atomic operation is one thread's, and releases what all threads stored
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1
    tl.debug_barrier()
    return last


@triton.jit
def open_messages(
    messages, stride, own, rank, rows, step, mask, numel, flag,
    COUNT: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr, CLEARS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the heads of ``COUNT`` messages, of at most ``BYTES`` bytes with bits; see ``Opening``.

    It takes ``SIZE`` peers, or pairs of a peer and a byte, at a time: the loads of a step do not wait for each other.
    What other programs stored is not looked up in the cache of this one's processor (".cg").
    """
    at = tl.arange(0, SIZE)
    value = tl.load(flag, cache_modifier=".cg")
    for first in range(0, COUNT, SIZE):
        peer = first + at
        heads = (messages + peer * stride).to(tl.pointer_type(tl.float32))
        tl.store(heads, tl.zeros([SIZE], tl.float32) + value, mask=(peer < COUNT) & (peer != rank))
    if rank >= 0:
        tl.store(own.to(tl.pointer_type(tl.float32)), value)
    if BYTES:  # else their number would be divided by 0
        for first in range(0, COUNT * BYTES, SIZE):
            pair = first + at
            peer, byte = pair // BYTES, pair % BYTES
            count = tl.load(rows + peer * step, mask=peer < COUNT, other=0)
            bit = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
            there = bit < count[:, None]
            place = tl.load(rows + 1 + (peer * step)[:, None] + bit, mask=there, other=0)
            used = tl.load(mask + place, mask=there, other=0, cache_modifier=".cg").to(tl.int32)
            packed = tl.sum(used << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)
            inside = byte * 8 < count
            tl.store(messages + peer * stride + BITS + byte, packed, mask=inside & (peer != rank))
            tl.store(own + BITS + byte, packed, mask=inside & (peer == rank))
    tl.debug_barrier()  # all bits are read before the mask is cleared
    for first in range(0, CLEARS * SIZE, SIZE):
        tl.store(mask + first + at, tl.zeros([SIZE], tl.uint8), mask=first + at < numel)
