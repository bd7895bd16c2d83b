"""The kernels that ``fft_triton.py`` launches; see there for most arguments.

A program reads a few blocks, transforms them in registers, sends the largest coefficients, and transforms these back.
``L`` is the padded length of a block. A block has ``L / 2`` complex coefficients and a last one that is real; ``KEEP``
are sent. Coefficients are float32 ``[ROWS, L]``, real and imaginary parts alternately. See ``spectrum.py``, ``fft.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.codecs.packing.planes_triton import read_code, write_codes
from lightning_compress.codecs.quantize import minifloat_triton
from lightning_compress.codecs.spectral import bins_triton
from lightning_compress.codecs.spectral.fourier_triton import real_inverse, real_transform
from lightning_compress.kernels.triton.launch import kernel, read, read_sum, write

_PACKED = tl.constexpr(1024)
"""Codes that ``encode`` packs at a time."""


@triton.jit
def indices(number, inside, start, length, L: tl.constexpr):
    """Return the indices of blocks' elements in the vector, ``[ROWS, L / 2, 2]``, and which of them exist."""
    order = 2 * tl.arange(0, L // 2)[:, None] + tl.arange(0, 2)[None, :]
    index = start + (number * L)[:, None, None] + order[None, :, :]
    return index, inside[:, None, None] & (order < length)[None, :, :]


@triton.jit
def analyse(numbers, table, L: tl.constexpr):
    """Transform blocks.

    Args:
        numbers: float32 ``[ROWS, L / 2, 2]``.
        table: from ``fft_triton.waves``.
        L: the padded length.

    Returns:
        The scale, a power of two that avoids overflow, ``[ROWS, 1]``; the coefficients, ``[ROWS, L]``; and the last
        coefficient, which is real, ``[ROWS, 1]``.
    """
    ROWS: tl.constexpr = numbers.shape[0]
    LIMIT: tl.constexpr = limit(L)
    largest = tl.max(tl.max(tl.abs(numbers), axis=2), axis=1)[:, None]
    exponent = tl.where(largest > 0, (largest.to(tl.int32, bitcast=True) >> 23) - 126, 0)
    exponent = tl.minimum(tl.maximum(exponent, -125), LIMIT)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(numbers * inverse[:, :, None], -1.0), 1.0)
    even, odd = tl.split(scaled)
    real, imaginary, last = real_transform(even, odd, table)
    return scale, tl.reshape(tl.join(real, imaginary), [ROWS, L]), last


@triton.jit
def synthesise(coefficients, last, table, L: tl.constexpr):
    """Return the blocks of coefficients, float32 ``[ROWS, L / 2, 2]``; the inverse of ``analyse``."""
    ROWS: tl.constexpr = coefficients.shape[0]
    real, imaginary = tl.split(tl.reshape(coefficients, [ROWS, L // 2, 2]))
    even, odd = real_inverse(real, imaginary, last, table)
    return tl.join(even, odd)


@triton.jit
def spread(rows):
    """Return every element twice, for both parts of a coefficient."""
    return tl.reshape(tl.join(rows, rows), [rows.shape[0], 2 * rows.shape[1]])


@triton.constexpr_function
def limit(length):
    """Return the exponent of the largest scale: beyond it, sums of the inverse transform could overflow."""
    return 126 - 2 * (length.bit_length() - 1)


@kernel(do_not_specialize=["step", "length"])
def measure(
    first, second, errors, table, step: tl.int64, start, length: tl.int64,
    L: tl.constexpr, KEEP: tl.constexpr, LISTED: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Write the squared error of each block of the sample with each candidate, one program, of equal rows, per pair."""
    mantissa = tl.program_id(1)
    number = tl.program_id(0) * step + tl.zeros([ROWS], tl.int64)
    index, inside = indices(number, number >= 0, start, length, L)
    numbers = read_sum(first, second, index, inside, SUM, False)
    _, kept, last, _, _, _ = _select(numbers, table, L, KEEP)
    format = minifloat_triton.build(*_range(kept, last), mantissa, BITS, True)
    error, final = (
        minifloat_triton.error(kept, *format).to(tl.float64),
        minifloat_triton.error(last, *format).to(tl.float64),
    )
    total = tl.sum(error * error, axis=1) + tl.sum(final * final, axis=1)
    row = tl.arange(0, ROWS)
    tl.store(errors + tl.program_id(0) * tl.num_programs(1) + mantissa + row, total, mask=row == 0)


@triton.jit
def _select(numbers, table, L: tl.constexpr, KEEP: tl.constexpr):
    """Return scales, chosen coefficients (0 elsewhere) and last one, and what ``bins_triton.largest`` returns."""
    scale, coefficients, last = analyse(numbers, table, L)
    energy = coefficients * coefficients
    energy = tl.sum(tl.reshape(energy, [numbers.shape[0], L // 2, 2]), axis=2)
    chosen, before, final = bins_triton.largest(energy, last * last, KEEP)
    kept = tl.where(spread(chosen.to(tl.int32)) != 0, coefficients, 0.0)
    return scale, kept, tl.where(final, last, 0.0), chosen, before, final


@triton.jit
def _range(kept, last):
    """Return the least and the largest chosen part; 0 if no part is below or above 0."""
    last = tl.max(last, axis=1)
    low, high = tl.minimum(tl.min(kept, axis=1), last), tl.maximum(tl.max(kept, axis=1), last)
    return tl.minimum(low, 0.0), tl.maximum(high, 0.0)


@kernel(do_not_specialize=["length", "base", "blocks", "end0", "begin0", "end1", "begin1", "end2", "begin2"])
def encode(
    first, second, vector, message, ranges, where, body, room, errors, table, start,
    length: tl.int64, base: tl.int64, blocks: tl.int64, count: tl.int64, middle: tl.int64, final_plane: tl.int64,
    end0: tl.int64, begin0: tl.int64, end1: tl.int64, begin1: tl.int64, end2: tl.int64, begin2: tl.int64,
    L: tl.constexpr, KEEP: tl.constexpr, LISTED: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, MANTISSA: tl.constexpr, SAMPLE: tl.constexpr, TRIED: tl.constexpr,
    SUM: tl.constexpr, WHOLE: tl.constexpr, HEAD: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Encode blocks. Codes are written to ``room``, and packed from there: with ``PACK`` by the same program.

    Otherwise ``pack`` does it, because a program's packed codes would begin within a byte.
    """
    if MANTISSA < 0:
        mantissa = minifloat_triton.best(errors, SAMPLE, TRIED)
    else:
        mantissa = tl.full([], MANTISSA, tl.int32)
    number = base + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    some = number < blocks
    index, inside = indices(number, some, start, length, L)
    numbers = read_sum(first, second, index, inside, SUM, WHOLE)
    scale, kept, last, chosen, before, final = _select(numbers, table, L, KEEP)
    low, high = _range(kept, last)
    tl.store(ranges + number, tl.max(scale, axis=1), mask=some)
    tl.store(ranges + blocks + number, low, mask=some)
    tl.store(ranges + 2 * blocks + number, high, mask=some)
    bins_triton.write(chosen, before, final, where, number, some, KEEP, LISTED)
    format = minifloat_triton.build(low, high, mantissa, BITS, True)
    codes, sent = minifloat_triton.encode(kept, *format)
    code, end = minifloat_triton.encode(last, *format)
    row = ((number - base) * (2 * KEEP))[:, None]
    target = room + row + (spread(before) * 2 + (tl.arange(0, L) % 2)[None, :])
    tl.store(target, codes, mask=(spread(chosen.to(tl.int32)) != 0) & some[:, None])
    target = room + row + 2 * (KEEP - 1)
    tl.store(target, code, mask=final & some[:, None])
    tl.store(target + 1, tl.zeros_like(code), mask=final & some[:, None])
    write(vector, index, numbers - synthesise(sent, end, table, L) * scale[:, :, None], inside, WHOLE)
    if tl.program_id(0) == 0:
        byte, zeros = tl.arange(0, 16), tl.zeros([16], tl.uint8)
        if HEAD:
            minifloat_triton.write_mantissa(message, mantissa)
        tl.store(message + end0 + byte, zeros, mask=byte < begin0 - end0)
        tl.store(message + end1 + byte, zeros, mask=byte < begin1 - end1)
        tl.store(message + end2 + byte, zeros, mask=byte < begin2 - end2)
    if PACK:
        tl.debug_barrier()  # other threads wrote the codes
        CODES: tl.constexpr = 2 * KEEP * ROWS
        own = room + tl.program_id(0).to(tl.int64) * CODES
        code = base * (2 * KEEP) + tl.program_id(0).to(tl.int64) * CODES
        for at in tl.static_range(0, CODES, _PACKED):
            column = tl.arange(0, _PACKED)
            inside = (at + column < CODES) & (code + at + column < count)
            codes = tl.load(own + at + column, mask=inside, other=0)[None, :]
            SOME: tl.constexpr = min((CODES - at + 7) // 8 * 8, _PACKED)
            write_codes(codes, body, middle, final_plane, code + at + tl.arange(0, 1), count, SOME, BITS, False)


@kernel(do_not_specialize=["some", "base"])
def pack(
    room, body, some: tl.int64, base: tl.int64, count: tl.int64, middle, last,
    WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Pack ``some`` codes of ``room``. The first of them is code ``base`` of the message."""
    index = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    codes = tl.load(room + index, mask=index < some, other=0)[None, :]
    first = base + tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, 1)
    write_codes(codes, body, middle, last, first, count, WIDTH, BITS, False)


@kernel(do_not_specialize=["length", "blocks"])
def decode(
    header, ranges, step: tl.int64, where, body, stride: tl.int64, out, weight, table,
    start, length: tl.int64, blocks: tl.int64, count, middle, final,
    L: tl.constexpr, KEEP: tl.constexpr, LISTED: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, MESSAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum the coefficients of all messages, and transform the sum back."""
    BOUND: tl.constexpr = 2.0 ** limit(L)
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    some = number < blocks
    total, last = tl.zeros([ROWS, L], tl.float32), tl.zeros([ROWS, 1], tl.float32)
    for message in range(MESSAGES):
        mantissa = tl.load(header + message * step).to(tl.int32, bitcast=True)
        row = ranges + message * step + number
        scale = _clamped(row, some, 0.0, BOUND)[:, None] * weight
        low, high = _clamped(row + blocks, some, -L, L), _clamped(row + 2 * blocks, some, -L, L)
        shift, _, below, positive, negative = minifloat_triton.build(low, high, mantissa, BITS, True)
        chosen, before, end = bins_triton.read(where + message * stride, number, some, L // 2, KEEP, LISTED)
        code = body + message * stride
        index = (number * (2 * KEEP))[:, None] + (spread(before) * 2 + (tl.arange(0, L) % 2)[None, :])
        inside = spread(chosen.to(tl.int32)) != 0
        codes = read_code(code, middle, final, index, inside, count, BITS)
        magnitudes, minus = minifloat_triton.decode(codes, shift, below, positive, negative, BITS)
        total += tl.where(minus, -magnitudes, magnitudes) * scale
        index = ((number + 1) * (2 * KEEP))[:, None] - 2
        codes = read_code(code, middle, final, index, end, count, BITS)
        magnitudes, minus = minifloat_triton.decode(codes, shift, below, positive, negative, BITS)
        last += tl.where(minus, -magnitudes, magnitudes) * scale
    element, inside = indices(number, some, start, length, L)
    numbers = synthesise(total, last, table, L)
    if ADD:
        numbers += read(out, element, inside, WHOLE)
    write(out, element, numbers, inside, WHOLE)


@triton.jit
def _clamped(numbers, inside, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Load numbers, clamped to bounds; NaN becomes 0."""
    loaded = tl.load(numbers, mask=inside, other=0.0)
    return tl.minimum(tl.maximum(tl.where(loaded == loaded, loaded, 0.0), LEAST), MOST)
