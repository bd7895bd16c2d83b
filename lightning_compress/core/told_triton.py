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
