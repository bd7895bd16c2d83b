"""Blocks in registers: read, scaled, transformed, and back; see ``spectrum.py`` and ``transforms.py``.

Coefficients are ``[ROWS, L]`` numbers of blocks that are filled up to L elements, real and imaginary parts alternately.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.codecs.spectral.fourier_triton import real_inverse, real_transform


@triton.jit
def indices(number, inside, start, length, L: tl.constexpr):
    """Where the elements of blocks stand in the vector, ``[ROWS, L / 2, 2]``."""
    order = 2 * tl.arange(0, L // 2)[:, None] + tl.arange(0, 2)[None, :]
    index = start + (number * L)[:, None, None] + order[None, :, :]
    return index, inside[:, None, None] & (order < length)[None, :, :]


@triton.jit
def analyse(numbers, table, L: tl.constexpr):
    """Transform blocks.

    Args:
        numbers: float32 ``[ROWS, L / 2, 2]``.
        table: as ``transforms.py`` has it, from ``waves``.
        L: the length.

    Returns:
        scale and its reciprocal, a power of two so that nothing overflows, ``[ROWS, 1]``; coefficients; and the last
        one, which is real, ``[ROWS, 1]``.
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
    """Blocks again, float32 ``[ROWS, L / 2, 2]``; see ``analyse``."""
    ROWS: tl.constexpr = coefficients.shape[0]
    real, imaginary = tl.split(tl.reshape(coefficients, [ROWS, L // 2, 2]))
    even, odd = real_inverse(real, imaginary, last, table)
    return tl.join(even, odd)


@triton.jit
def spread(rows):
    """Every element twice, for the parts of a coefficient."""
    return tl.reshape(tl.join(rows, rows), [rows.shape[0], 2 * rows.shape[1]])


@triton.constexpr_function
def limit(length):
    """A value that is scaled down by no more than 2 to this power overflows in no sum of an inverse transform."""
    return 126 - 2 * (length.bit_length() - 1)
