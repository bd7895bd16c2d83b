"""Rounding the elements of one or of several segments to -1, 0 and 1 times the segment's scale; see ``ternary.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.kernels.triton.launch import read_sum, write
from lightning_compress.kernels.triton.levels import round_levels
from lightning_compress.kernels.triton.random import random16, words

ROWS = tl.constexpr(512)
"""Of four elements, which a program has in registers at a time."""
TILE = tl.constexpr(4 * ROWS.value)


@triton.jit
def span_of(spans, number):
    """The segments of the first and of the last one of some elements."""
    return tl.load(spans + 2 * number), tl.load(spans + 2 * number + 1)


@triton.jit
def tile():
    """Where a program's elements stand from its first one on, int32 ``[ROWS, 4]``."""
    return tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def up_to(stop, start):
    """How far a program's elements go, from where they start."""
    return tl.minimum(stop - start, TILE).to(tl.int32)


@triton.jit
def own(values, edges, start, place, owner, last, WHOLE: tl.constexpr):
    """The value of each element's segment, by the segments' values; where they are all of one, that one's."""
    found = tl.load(values + owner)
    if not WHOLE:
        found = tl.full(place.shape, 0.0, tl.float32) + found
        while owner < last:
            owner += 1
            edge = (tl.load(edges + owner) - start).to(tl.int32)
            found = tl.where(place >= edge, tl.load(values + owner), found)
    return found


@triton.jit
def round_tile(
    first, second, vector, scales, factors, edges, owner, last, start, stop, state,
    CLIP: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Round the elements from ``start`` on: -1, 0 and 1 as 0, 1 and 2, int32 ``[ROWS, 4]``; beyond ``stop`` they are 0.

    ``owner`` and ``last`` are the segments of the first one and of the last one. ``WHOLE`` says that these are one
    segment, that all are before ``stop``, and that ``start`` is a multiple of 4.
    """
    place = tile()
    inside = place < up_to(stop, start)
    numbers = read_sum(first + start, second + start, place, inside, SUM, WHOLE)
    scaled = numbers * own(factors, edges, start, place, owner, last, WHOLE)
    if CLIP:
        scaled = tl.maximum(tl.minimum(scaled, 65536.0), -65536.0)
    if WHOLE:
        random = random16(state, start // 4 + tl.arange(0, ROWS))
    else:  # a byte's digits need not begin at a word's
        random = (words(state, (start + place) // 4) >> ((start + place) % 4 * 16).to(tl.uint64)).to(tl.int32)
    levels = round_levels(scaled, random.to(tl.int16).to(tl.float32), 0.0)
    if KEEP:
        left = numbers - levels * own(scales, edges, start, place, owner, last, WHOLE)
        write(vector + start, place, left, inside, WHOLE)
    codes = levels.to(tl.int32) + 1
    return codes if WHOLE else tl.where(inside, codes, 0)


@triton.jit
def begin(out, place, end, add, WHOLE: tl.constexpr):
    """What messages are added to: what is there, or 0, by the same (masked) load, so that it is spread out alike."""
    if WHOLE:
        found = tl.load(out + place, mask=add != 0, other=0.0)
    else:
        found = tl.load(out + place, mask=(place < end) & (add != 0), other=0.0)
    return found
