"""The elements that reach a bound, tile by tile, and those of them that are sent; ``topk.py`` launches these."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.codecs.sparse.topk_radix_triton import (
    BOUND,
    COLUMNS,
    COUNT,
    FIELDS,
    LIST,
    LISTED,
    PREFIX,
    RANK,
    ROOM,
    RUN,
    SLOT,
    TILE,
    magnitude_bits,
)
from lightning_compress.kernels.triton.launch import kernel, read_sum, write

TILE_NUMEL = 2048
"""Elements of a tile: tiles begin at multiples of it, and are shorter where a part begins or ends."""
RUN_TILES = 256
"""Tiles whose counts are summed."""
_COLUMNS, _FIELDS, _TILE, _RUN = (tl.constexpr(each) for each in (COLUMNS, FIELDS, TILE_NUMEL, RUN_TILES))
_LARGEST = tl.constexpr(65504.0)
"""Of float16."""


@kernel
def collect(first, second, vector, tiles, parts, state, listed, found, SUM: tl.constexpr):
    """Write the sum, and list a tile's elements that reach the bound of its part: int64, the index above the bits."""
    tile = tiles + tl.program_id(0) * 4
    begin, end = tl.load(tile), tl.load(tile + 1)
    if end - begin == _TILE:
        _collect(first, second, vector, tile, parts, state, listed, found, SUM, True)
    else:
        _collect(first, second, vector, tile, parts, state, listed, found, SUM, False)


@triton.jit
def _collect(
    first, second, vector, tile, parts, state, listed, found, SUM: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    begin, end, owner = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if WHOLE:
        begin = tl.multiple_of(begin, _TILE)
    column = tl.arange(0, _TILE)
    inside = column < end - begin
    numbers = read_sum(first + begin, second + begin, column, inside, SUM, WHOLE)
    part, mine = parts + owner * _COLUMNS, state + owner * _FIELDS
    hit = inside & (magnitude_bits(numbers) >= tl.load(mine + BOUND))
    if SUM:
        write(vector + begin, column, numbers, inside, WHOLE)
    count = tl.sum(hit.to(tl.int32), axis=0)
    base = tl.atomic_add(mine + COUNT, count, sem="relaxed")
    tl.store(found + 2 * tl.program_id(0), base)
    tl.store(found + 2 * tl.program_id(0) + 1, count)
    if (count > 0) & (base + count <= tl.load(part + ROOM)):
        slot = tl.load(part + LIST) + base + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        bits = numbers.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.store(listed + slot, (begin + column).to(tl.int64) << 32 | bits, mask=hit)


@kernel
def count(
    vector, listed, tiles, parts, state, found, counts, runs, LISTED_WIDTH: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Count in each tile what is larger than the k-th largest of its part, and what is equal."""
    owner = tl.load(tiles + tl.program_id(0) * 4 + 2)
    part, mine = parts + owner * _COLUMNS, state + owner * _FIELDS
    least = tl.load(mine + PREFIX)
    if tl.load(mine + LISTED) != 0:
        base, amount = tl.load(found + 2 * tl.program_id(0)), tl.load(found + 2 * tl.program_id(0) + 1)
        word = _count(listed + (tl.load(part + LIST) + base).to(tl.int64) * 2, 2, amount, least, LISTED_WIDTH)
    else:
        begin, end = tl.load(tiles + tl.program_id(0) * 4), tl.load(tiles + tl.program_id(0) * 4 + 1)
        word = _count(vector + begin, 1, end - begin, least, WIDTH)
    tl.store(counts + tl.program_id(0), word)
    run = tl.load(part + RUN) + (tl.program_id(0) - tl.load(part + TILE)) // _RUN
    if word != 0:
        tl.atomic_add(runs + run, word, sem="relaxed")


@triton.jit
def _count(numbers, STEP: tl.constexpr, amount, least, WIDTH: tl.constexpr):
    """How many are larger, times 2^32, and how many are equal."""
    larger, equal = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    position = amount * 0
    while position < amount:
        number = position + tl.arange(0, WIDTH)
        bits = magnitude_bits(tl.load(numbers + STEP * number, mask=number < amount, other=0.0))
        larger += ((bits > least) & (number < amount)).to(tl.int32)
        equal += ((bits == least) & (number < amount)).to(tl.int32)
        position += WIDTH
    return (tl.sum(larger, axis=0).to(tl.int64) << 32) + tl.sum(equal, axis=0)


@kernel(do_not_specialize=["spare"])
def emit(
    vector, listed, origins, tiles, parts, state, found, counts, runs, indices, values, spare,
    LISTED_WIDTH: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write what is larger, and of what is equal the first ones, in order; what was not sent stays in the vector."""
    number = tl.program_id(0)
    owner = tl.load(tiles + number * 4 + 2)
    part, mine = parts + owner * _COLUMNS, state + owner * _FIELDS
    slot = tl.load(part + SLOT)
    if tl.load(counts + number) != 0:
        before = _before(counts, runs + tl.load(part + RUN), tl.load(part + TILE))
        least, rest = tl.load(mine + PREFIX), tl.load(mine + RANK)
        if tl.load(mine + LISTED) != 0:
            start = 2 * (tl.load(part + LIST) + tl.load(found + 2 * number)).to(tl.int64)
            amount = tl.load(found + 2 * number + 1)
            _emit(
                vector, listed + start, origins + start, amount, 0, before, least, rest,
                indices + slot, values + slot, True, LISTED_WIDTH, HALF,
            )  # fmt: skip
        else:
            begin = tl.load(tiles + number * 4)
            amount = tl.load(tiles + number * 4 + 1) - begin
            _emit(
                vector, vector + begin, origins, amount, begin, before, least, rest,
                indices + slot, values + slot, False, WIDTH, HALF,
            )  # fmt: skip
    if (number == 0) & (spare >= 0):
        tl.store(indices + spare, 0)
        tl.store(values + spare, 0.0)


@triton.jit
def _before(counts, runs, first):
    """The counts of the tiles of this part before this one."""
    own = tl.program_id(0) - first
    number = tl.arange(0, _RUN)
    here = number < own % _RUN
    words = tl.load(counts + first + own // _RUN * _RUN + number, mask=here, other=0)
    run = own * 0
    while run < own // _RUN:
        words += tl.load(runs + run + number, mask=run + number < own // _RUN, other=0)
        run += _RUN
    return tl.sum(words, axis=0)


@triton.jit
def _emit(
    vector, numbers, origins, amount, begin, before, least, rest, indices, values,
    LISTED: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    above, earlier = (before >> 32).to(tl.int32), (before & 0xFFFFFFFF).to(tl.int32)
    position = amount * 0
    while position < amount:
        number = position + tl.arange(0, WIDTH)
        inside = number < amount
        found = tl.load(numbers + number * (2 if LISTED else 1), mask=inside, other=0.0)
        bits = magnitude_bits(found)
        larger, equal = (bits > least) & inside, (bits == least) & inside
        word = (larger.to(tl.int32) << 16) + equal.to(tl.int32)  # a tile's counts have 13 bits
        local = tl.cumsum(word, axis=0) - word
        ties = earlier + (local & 0xFFFF)
        chosen = larger | (equal & (ties < rest))
        slot = above + (local >> 16) + tl.minimum(ties, rest)
        index = tl.load(origins + 2 * number, mask=chosen, other=0) if LISTED else begin + number
        sent = tl.minimum(tl.maximum(found, -_LARGEST), _LARGEST).to(values.dtype.element_ty) if HALF else found
        tl.store(indices + slot, index, mask=chosen)
        tl.store(values + slot, sent, mask=chosen)
        tl.store(vector + index, found - sent.to(tl.float32), mask=chosen)
        total = tl.sum(word, axis=0)
        above += total >> 16
        earlier += total & 0xFFFF
        position += WIDTH
