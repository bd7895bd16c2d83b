"""The kernels that ``topk_triton.py`` launches.

The bits of magnitudes, as integers, have the same order as the magnitudes. So the k-th largest magnitude of a part is
found digit by digit, by three rounds of histograms (of 11, 10 and 10 bits). A round is one launch: the last program of
a part to arrive picks the digit. The result does not depend on the order of programs, because only integers are summed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.kernels.triton.launch import kernel, read_sum, write

CHUNK = 1024
"""Elements that a program handles at a time."""
BINS = 2048
"""Bins of the widest histogram, that of the first digit."""
DIGITS = ((20, 11), (10, 10), (0, 10))
"""Position of each round's digit in the bits, and its number of bits."""

# Columns of ``parts``, int32: what the layout determines.
COLUMNS = 13
START, LENGTH, KEPT, SLOT, TILE, LIST, ROOM = (tl.constexpr(column) for column in range(7))
STRIDE, FEW, MORE, LOOKS, RUN, RUNS = (tl.constexpr(column) for column in range(7, 13))
# Columns of ``state``, int32: what an encoding finds.
FIELDS = 7
BOUND, PREFIX, RANK, ARRIVED, COUNT, AMOUNT, LISTED = (tl.constexpr(column) for column in range(7))
_COLUMNS, _FIELDS, _BINS = tl.constexpr(COLUMNS), tl.constexpr(FIELDS), tl.constexpr(BINS)

TILE_NUMEL = 2048
"""Elements of a tile. Tiles start at multiples of it, and are shorter where a part starts or ends."""
RUN_TILES = 256
"""Tiles of a run, whose counts are summed."""
_TILE, _RUN = tl.constexpr(TILE_NUMEL), tl.constexpr(RUN_TILES)
_LARGEST = tl.constexpr(65504.0)
"""The largest float16."""


@triton.jit
def magnitude_bits(numbers):
    """Return the bits of magnitudes, int32, in the order of the magnitudes."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel(do_not_specialize=["high", "low"])
def sample(
    first, second, owners, parts, state, histogram, high: tl.int64, low: tl.int64,
    SUM: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Do the first round with a strided sample of each part.

    The sample's offset is the unsigned key ``2^32 high + low`` modulo the stride.
    """
    owner = tl.load(owners + 2 * tl.program_id(0))
    part, mine = parts + owner * _COLUMNS, state + owner * _FIELDS
    stride, length = tl.load(part + STRIDE).to(tl.int64), tl.load(part + LENGTH)
    offset = ((high % stride) * ((1 << 32) % stride) + low % stride) % stride
    size = ((length - offset + stride - 1) // stride).to(tl.int32)
    number = tl.load(owners + 2 * tl.program_id(0) + 1) * CHUNK + tl.arange(0, CHUNK)
    inside = number < size
    index = tl.load(part + START) + offset + number * stride
    numbers = read_sum(first, second, index, inside, SUM, False)
    counts = tl.histogram(magnitude_bits(numbers) >> SHIFT, 1 << DIGIT, mask=inside)
    if arrive(counts, histogram + owner * _BINS, mine, tl.load(part + LOOKS), DIGIT):
        rank = tl.load(part + FEW) if size == length // stride.to(tl.int32) else tl.load(part + MORE)
        found = pick(histogram + owner * _BINS, mine, 0, rank, SHIFT, DIGIT)
        tl.store(mine + BOUND, tl.where(rank > 0, found, 0))


@kernel
def narrow(
    vector, listed, owners, parts, state, histogram, runs,
    SHIFT: tl.constexpr, DIGIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Do a round with a part's list, or with all its elements if the list has too few or too many."""
    owner = tl.load(owners + 3 * tl.program_id(0))
    part, mine = parts + owner * _COLUMNS, state + owner * _FIELDS
    position = tl.load(owners + 3 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    programs = tl.load(owners + 3 * tl.program_id(0) + 2)
    bound, rank, is_listed, amount, prefix = _source(part, mine, SHIFT)
    numbers = vector + tl.load(part + START)
    step = 1
    if is_listed != 0:
        numbers = listed + 2 * tl.load(part + LIST).to(tl.int64)
        step = 2  # the list also holds indices
    counts = tl.zeros([1 << DIGIT], tl.int32)
    while position < amount:
        number = position + tl.arange(0, CHUNK)
        inside = number < amount
        bits = magnitude_bits(tl.load(numbers + number * step, mask=inside, other=0.0))
        counts += _histogram(bits, inside & (bits >= bound), prefix, SHIFT, DIGIT)
        position += programs * CHUNK
    if arrive(counts, histogram + owner * _BINS, mine, programs, DIGIT):
        if SHIFT == 20:  # first round
            tl.store(mine + BOUND, bound)
            tl.store(mine + AMOUNT, amount)
            tl.store(mine + LISTED, is_listed)
            tl.store(mine + COUNT, 0)
        if SHIFT == 0:  # last round
            run = 0
            while run < tl.load(part + RUNS):
                number = run + tl.arange(0, 256)
                tl.store(runs + tl.load(part + RUN) + number, 0, mask=number < tl.load(part + RUNS))
                run += 256
        pick(histogram + owner * _BINS, mine, prefix, rank, SHIFT, DIGIT)


@triton.jit
def _source(part, mine, SHIFT: tl.constexpr):
    """Return the bound, the rank, whether to read the list, the number of elements, and the digits so far."""
    bound, amount = tl.load(mine + BOUND), tl.load(mine + AMOUNT)
    rank, is_listed, prefix = tl.load(mine + RANK), tl.load(mine + LISTED), tl.load(mine + PREFIX)
    if SHIFT == 20:
        rank = tl.load(part + KEPT)
        count, room = tl.load(mine + COUNT), tl.load(part + ROOM)
        enough = count >= rank
        bound = tl.where(enough, bound, 0)
        is_listed = (enough & (count <= room) & (room > 0)).to(tl.int32)
        amount = tl.where(is_listed != 0, count, tl.load(part + LENGTH))
        prefix = prefix * 0
    return bound, rank, is_listed, amount, prefix


@triton.jit
def _histogram(bits, inside, prefix, SHIFT: tl.constexpr, DIGIT: tl.constexpr):
    """Return the histogram of the digit among elements whose higher bits equal the prefix."""
    matching = inside & ((bits >> SHIFT >> DIGIT) == (prefix >> SHIFT >> DIGIT))
    return tl.histogram((bits >> SHIFT) & ((1 << DIGIT) - 1), 1 << DIGIT, mask=matching)


@triton.jit
def arrive(counts, histogram, mine, programs, DIGIT: tl.constexpr):
    """Add a program's counts to its part's, and return whether this was the last program of the part."""
    tl.atomic_add(histogram + tl.arange(0, 1 << DIGIT), counts, mask=counts > 0, sem="relaxed")
    tl.debug_barrier()  # the counts of all threads are added before this program arrives
    return tl.atomic_add(mine + ARRIVED, 1, sem="acq_rel") == programs - 1


@triton.jit
def pick(histogram, mine, prefix, rank, SHIFT: tl.constexpr, DIGIT: tl.constexpr):
    """Find the digit of the ``rank``-th largest (all ones if rank is 0), and reset the counters for the next round.

    Returns:
        The prefix with this digit.
    """
    digits = tl.arange(0, 1 << DIGIT)
    counts = tl.load(histogram + digits, cache_modifier=".cg")
    reaching = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts  # elements with this digit or a higher one
    digit = tl.maximum(tl.sum((reaching >= rank).to(tl.int32), axis=0) - 1, 0)
    tl.store(mine + RANK, rank - tl.sum(tl.where(digits > digit, counts, 0), axis=0))
    prefix |= digit << SHIFT
    tl.store(mine + PREFIX, prefix)
    tl.store(mine + ARRIVED, 0)
    tl.store(histogram + digits, tl.zeros([1 << DIGIT], tl.int32))
    return prefix


@kernel
def collect(first, second, vector, tiles, parts, state, listed, found, SUM: tl.constexpr):
    """Write the sum, and list a tile's elements that reach its part's bound: int64, the index above the bits."""
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
    """Count each tile's elements that are larger than the k-th largest of its part, and those that are equal."""
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
    """Return the number of larger elements times 2^32, plus the number of equal elements."""
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
    """Write the larger elements and the first of the equal ones, in order. What was not sent stays in the vector."""
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
    """Return the sum of the counts of this part's earlier tiles."""
    tile = tl.program_id(0) - first
    number = tl.arange(0, _RUN)
    here = number < tile % _RUN
    words = tl.load(counts + first + tile // _RUN * _RUN + number, mask=here, other=0)
    run = tile * 0
    while run < tile // _RUN:
        words += tl.load(runs + run + number, mask=run + number < tile // _RUN, other=0)
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


@kernel(do_not_specialize=["count"])
def merge(
    out, indices, values, index_stride: tl.int64, value_stride: tl.int64, tiles, parts, weight, count,
    ADD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write or add the weighted sum of ``count`` lists to a tile, one list after the other: ranks find equal bits.

    A part's positions are in ascending order. Of damaged lists, positions outside the tile are left out.
    """
    tile = tiles + tl.program_id(0) * 4
    begin, end = tl.load(tile), tl.load(tile + 1)
    part = parts + tl.load(tile + 2) * _COLUMNS
    slot, kept = tl.load(part + SLOT), tl.load(part + KEPT)
    if not ADD:
        column = tl.arange(0, _TILE)
        if end - begin == _TILE:
            tl.store(out + tl.multiple_of(begin, _TILE) + column, tl.zeros([_TILE], tl.float32))
        else:
            tl.store(out + begin + column, tl.zeros([_TILE], tl.float32), mask=column < end - begin)
    number = index_stride * 0
    while number < count:
        tl.debug_barrier()  # what other threads stored before is read below
        places = indices + number * index_stride + slot
        _merge(out, places, values + number * value_stride + slot, weight, begin, end, kept, WIDTH)
        number += 1


@triton.jit
def _merge(out, places, values, weight, begin, end, kept, WIDTH: tl.constexpr):
    """Add the entries of one list that are in ``[begin, end)``."""
    position = _reach(places, begin, kept, WIDTH)
    going = position < kept
    while going:
        number = position + tl.arange(0, WIDTH)
        place = tl.load(places + number, mask=number < kept, other=0x7FFFFFFF)
        mine = (place >= begin) & (place < end)
        total = tl.load(out + place, mask=mine, other=0.0)
        total += tl.load(values + number, mask=mine, other=0.0).to(tl.float32) * weight
        tl.store(out + place, total, mask=mine)
        position += WIDTH
        going = (position < kept) & (tl.max(place, axis=0) < end)


@triton.jit
def _reach(places, begin, kept, WIDTH: tl.constexpr):
    """Return how many of the ascending positions are below ``begin``, or up to ``WIDTH`` less."""
    first, amount = kept * 0, kept
    while amount > WIDTH:  # look at the ends of equal stretches, and go on in the one that holds the answer
        step = (amount + WIDTH - 1) // WIDTH
        number = first + (tl.arange(0, WIDTH) + 1) * step - 1
        below = tl.load(places + number, mask=number < first + amount, other=0x7FFFFFFF) < begin
        passed = tl.sum(below.to(tl.int32), axis=0) * step
        first += passed
        amount = tl.minimum(step, amount - passed)
    return first
