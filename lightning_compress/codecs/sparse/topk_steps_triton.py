"""The elements that reach a bound, tile by tile, and those of them that are sent; ``topk_triton.py`` launches these.

The k-th largest of many magnitudes is found part by part, by the digits of their bits.
The bits of a magnitude, as an integer, are ordered as the magnitudes are. Three rounds of histograms (11, 10 and 10
bits) find the k-th largest: the last program of a part to arrive picks the digit, so that a round is one launch. Sums
of integers are the same in any order, and nothing depends on which program is the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.kernels.triton.launch import kernel, read_sum, write

CHUNK = 1024
"""Numbers that a program handles at a time."""
BINS = 2048
"""Of the widest histogram, that of the first digit."""
DIGITS = ((20, 11), (10, 10), (0, 10))
"""Where each round's digit begins among the bits, and how many of them it has."""

# Of a part, as the layout has it: a row of ``parts``, int32.
COLUMNS = 13
START, LENGTH, KEPT, SLOT, TILE, LIST, ROOM = (tl.constexpr(each) for each in range(7))
STRIDE, FEW, MORE, LOOKS, RUN, RUNS = (tl.constexpr(each) for each in range(7, 13))
# Of a part, as an encoding finds it: a row of ``state``, int32.
FIELDS = 7
BOUND, PREFIX, RANK, ARRIVED, COUNT, AMOUNT, LISTED = (tl.constexpr(each) for each in range(7))
_COLUMNS, _FIELDS, _BINS = tl.constexpr(COLUMNS), tl.constexpr(FIELDS), tl.constexpr(BINS)

TILE_NUMEL = 2048
"""Elements of a tile: tiles begin at multiples of it, and are shorter where a part begins or ends."""
RUN_TILES = 256
"""Tiles whose counts are summed."""
_TILE, _RUN = tl.constexpr(TILE_NUMEL), tl.constexpr(RUN_TILES)
_LARGEST = tl.constexpr(65504.0)
"""Of float16."""


@triton.jit
def magnitude_bits(numbers):
    """The bits of magnitudes, int32; ordered as these are."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel(do_not_specialize=["high", "low"])
def sample(
    first, second, owners, parts, state, histogram, high: tl.int64, low: tl.int64,
    SUM: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Look at every so-manieth element of each part, and do the first round with these.

    The offset is the unsigned key ``2^32 high + low`` modulo the stride.
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
    """A round with the candidates that a list has, or with all elements of a part of which it has too few or many."""
    owner = tl.load(owners + 3 * tl.program_id(0))
    part, mine = parts + owner * _COLUMNS, state + owner * _FIELDS
    position = tl.load(owners + 3 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    programs = tl.load(owners + 3 * tl.program_id(0) + 2)
    bound, rank, is_listed, amount, prefix = _source(part, mine, SHIFT)
    numbers = vector + tl.load(part + START)
    step = 1
    if is_listed != 0:
        numbers = listed + 2 * tl.load(part + LIST).to(tl.int64)
        step = 2  # beside each one its index
    counts = tl.zeros([1 << DIGIT], tl.int32)
    while position < amount:
        number = position + tl.arange(0, CHUNK)
        inside = number < amount
        bits = magnitude_bits(tl.load(numbers + number * step, mask=inside, other=0.0))
        counts += _histogram(bits, inside & (bits >= bound), prefix, SHIFT, DIGIT)
        position += programs * CHUNK
    if arrive(counts, histogram + owner * _BINS, mine, programs, DIGIT):
        if SHIFT == 20:  # the first round
            tl.store(mine + BOUND, bound)
            tl.store(mine + AMOUNT, amount)
            tl.store(mine + LISTED, is_listed)
            tl.store(mine + COUNT, 0)
        if SHIFT == 0:  # the last one
            run = 0
            while run < tl.load(part + RUNS):
                number = run + tl.arange(0, 256)
                tl.store(runs + tl.load(part + RUN) + number, 0, mask=number < tl.load(part + RUNS))
                run += 256
        pick(histogram + owner * _BINS, mine, prefix, rank, SHIFT, DIGIT)


@triton.jit
def _source(part, mine, SHIFT: tl.constexpr):
    """From which magnitude on elements count, how many are wanted, and where they are: in a list, or in the vector."""
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
    """Of the digit, among those whose bits above it are the prefix's."""
    alike = inside & ((bits >> SHIFT >> DIGIT) == (prefix >> SHIFT >> DIGIT))
    return tl.histogram((bits >> SHIFT) & ((1 << DIGIT) - 1), 1 << DIGIT, mask=alike)


@triton.jit
def arrive(counts, histogram, mine, programs, DIGIT: tl.constexpr):
    """Add a program's counts to its part's; whether all programs of the part have done so."""
    tl.atomic_add(histogram + tl.arange(0, 1 << DIGIT), counts, mask=counts > 0, sem="relaxed")
    tl.debug_barrier()  # the counts of all threads are added before this program arrives
    return tl.atomic_add(mine + ARRIVED, 1, sem="acq_rel") == programs - 1


@triton.jit
def pick(histogram, mine, prefix, rank, SHIFT: tl.constexpr, DIGIT: tl.constexpr):
    """Find the digit of the ``rank``-th largest (all ones where none is wanted), and be ready for the next round.

    Returns:
        the prefix with this digit.
    """
    digits = tl.arange(0, 1 << DIGIT)
    counts = tl.load(histogram + digits, cache_modifier=".cg")
    reaching = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts  # of this digit or a higher one
    digit = tl.maximum(tl.sum((reaching >= rank).to(tl.int32), axis=0) - 1, 0)
    tl.store(mine + RANK, rank - tl.sum(tl.where(digits > digit, counts, 0), axis=0))
    prefix |= digit << SHIFT
    tl.store(mine + PREFIX, prefix)
    tl.store(mine + ARRIVED, 0)
    tl.store(histogram + digits, tl.zeros([1 << DIGIT], tl.int32))
    return prefix


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
