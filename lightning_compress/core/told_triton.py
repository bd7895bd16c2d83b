"""Reading of messages' heads by kernels that have something else to do; see ``told.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flag_of(messages, step, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return 0.0, or NaN if the flag of a message is not finite; ``WIDTH`` is a power of two, at least ``COUNT``."""
    number = tl.arange(0, WIDTH)
    flags = (messages + number * step).to(tl.pointer_type(tl.float32))
    return tl.sum(tl.load(flags, mask=number < COUNT, other=0.0) * 0.0, axis=0)


@triton.jit
def is_used(messages, step, bit, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return whether a bit is set in one of ``COUNT`` messages."""
    number = tl.arange(0, WIDTH)
    found = tl.load(messages + number * step + bit // 8, mask=number < COUNT, other=0).to(tl.int32)
    return tl.max((found >> (bit % 8).to(tl.int32)) & 1, axis=0) != 0


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
