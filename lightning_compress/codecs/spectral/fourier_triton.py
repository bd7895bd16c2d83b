"""Fourier transforms of complex and of real rows in a GPU's registers; see ``fft.py``.

A step is one of Stockham's, in the order that needs no bit reversal. A thread transforms 2, 4 or 8 numbers. Between two
steps, numbers change threads once, through shared memory.

Stockham, "High-Speed Convolution and Correlation", AFIPS Spring Joint Computer Conference 1966.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def transform(real, imaginary, table):
    """Return the unscaled discrete Fourier transform of complex rows, real and imaginary parts.

    With real and imaginary parts swapped, in the arguments and in the result, it is the inverse transform.

    Args:
        real: float32 ``[ROWS, N]``, N a power of two from 4 to 4096.
        imaginary: float32 ``[ROWS, N]``.
        table: pointer to ``exp(-i pi k / N)`` for k from 0 to N - 1, all real parts first.
    """
    N: tl.constexpr = real.shape[1]
    CUBE: tl.constexpr = N == 8 or N == 64 or N == 512 or N == 4096
    DOUBLE: tl.constexpr = N == 16 or N == 128 or N == 1024
    if CUBE:
        real, imaginary = _steps(real, imaginary, table, 1)
    elif DOUBLE:
        real, imaginary = _step2(real, imaginary, table)
        real, imaginary = _steps(real, imaginary, table, 2)
    else:
        real, imaginary = _step4(real, imaginary, table)
        real, imaginary = _steps(real, imaginary, table, 4)
    return real, imaginary


@triton.jit
def real_transform(even, odd, table):
    """Transform real rows of 2 N elements, orthonormally.

    Args:
        even: elements with even index, float32 ``[ROWS, N]``.
        odd: elements with odd index, float32 ``[ROWS, N]``.
        table: see ``transform``.

    Returns:
        Real and imaginary parts of the coefficients 0 to N - 1, ``[ROWS, N]``, and coefficient N, which is real,
        ``[ROWS, 1]``.
    """
    N: tl.constexpr = even.shape[1]
    real, imaginary = transform(even, odd, table)
    other, another = _mirrored(real), _mirrored(imaginary)
    k = tl.arange(0, N)
    cosine, sine = tl.load(table + k)[None, :], tl.load(table + N + k)[None, :]
    first = (k == 0)[None, :]
    last = tl.sum(tl.where(first, real - imaginary, 0.0), axis=1, keep_dims=True)
    a, b = real + other, imaginary - another  # twice the transforms of the even and of the odd elements
    c, d = imaginary + another, other - real
    e, f = product(c, d, cosine, sine)
    FACTOR: tl.constexpr = 0.5 * (2 * N) ** -0.5
    return (a + e) * FACTOR, (b + f) * FACTOR, last * (2 * FACTOR)


@triton.jit
def real_inverse(real, imaginary, last, table):
    """Return even and odd elements; the inverse of ``real_transform``."""
    N: tl.constexpr = real.shape[1]
    k = tl.arange(0, N)
    cosine, sine = tl.load(table + k)[None, :], tl.load(table + N + k)[None, :]
    first = (k == 0)[None, :]
    other, another = tl.where(first, last, _mirrored(real)), tl.where(first, 0.0, _mirrored(imaginary))
    a, b = real + other, imaginary - another
    c, d = product(real - other, imaginary + another, cosine, -sine)
    odd, even = transform(b + c, a - d, table)  # parts are swapped
    FACTOR: tl.constexpr = (2 * N) ** -0.5
    return even * FACTOR, odd * FACTOR


@triton.jit
def product(a, b, c, d):
    """Return real and imaginary part of ``(a + i b) (c + i d)``."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _mirrored(rows):
    """Return rows with element ``-k mod N`` at index k.

    It is done in two steps, for the low half of an index's bits and for the high half: the compiler gathers a whole
    axis within a warp, which would take thousands of moves for an axis of N elements.
    """
    ROWS: tl.constexpr = rows.shape[0]
    N: tl.constexpr = rows.shape[1]
    HIGH: tl.constexpr = _root(N)
    LOW: tl.constexpr = N // HIGH
    low, high = tl.arange(0, LOW)[None, None, :], tl.arange(0, HIGH)[None, :, None]
    square = tl.reshape(rows, [ROWS, HIGH, LOW])
    index = (LOW - low) & (LOW - 1)
    square = tl.gather(square, tl.broadcast_to(index, square.shape), axis=2)
    index = (HIGH - high - (low > 0).to(tl.int32)) & (HIGH - 1)
    square = tl.gather(square, tl.broadcast_to(index, square.shape), axis=1)
    return tl.reshape(square, [ROWS, N])


@triton.constexpr_function
def _root(number):
    """Return the largest power of two that is at most the square root of a power of two."""
    return 1 << ((number.bit_length() - 1) // 2)


@triton.jit
def _steps(real, imaginary, table, DONE: tl.constexpr):
    """Do the remaining steps, all of radix 8, after steps whose radices have the product ``DONE``."""
    if real.shape[1] > DONE:
        real, imaginary = _step8(real, imaginary, table, DONE)
        real, imaginary = _steps(real, imaginary, table, 8 * DONE)
    return real, imaginary


@triton.jit
def _factor(table, ROWS: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, DONE: tl.constexpr):
    """Return the factor of the second of every ``EACH`` numbers. The others are multiplied by its powers."""
    index = (tl.arange(0, ROWS * N // EACH) % (N // EACH)) // DONE * (2 * DONE)
    return tl.load(table + index), tl.load(table + N + index)


@triton.jit
def _step2(real, imaginary, table):
    ROWS: tl.constexpr = real.shape[0]
    N: tl.constexpr = real.shape[1]
    a, b = tl.split(_columns(real, 2))
    c, d = tl.split(_columns(imaginary, 2))
    cosine, sine = _factor(table, ROWS, N, 2, 1)
    e, f = product(a - b, c - d, cosine, sine)
    return _rows(tl.join(a + b, e), ROWS, 2, 1), _rows(tl.join(c + d, f), ROWS, 2, 1)


@triton.jit
def _step4(real, imaginary, table):
    ROWS: tl.constexpr = real.shape[0]
    N: tl.constexpr = real.shape[1]
    r0, r1, r2, r3 = _split4(_columns(real, 4))
    i0, i1, i2, i3 = _split4(_columns(imaginary, 4))
    r0, i0, r1, i1, r2, i2, r3, i3 = _four(r0, i0, r1, i1, r2, i2, r3, i3)
    if N > 4:
        c1, s1 = _factor(table, ROWS, N, 4, 1)
        c2, s2 = product(c1, s1, c1, s1)
        c3, s3 = product(c2, s2, c1, s1)
        r1, i1 = product(r1, i1, c1, s1)
        r2, i2 = product(r2, i2, c2, s2)
        r3, i3 = product(r3, i3, c3, s3)
    return _rows(_join4(r0, r1, r2, r3), ROWS, 4, 1), _rows(_join4(i0, i1, i2, i3), ROWS, 4, 1)


@triton.jit
def _step8(real, imaginary, table, DONE: tl.constexpr):
    ROWS: tl.constexpr = real.shape[0]
    N: tl.constexpr = real.shape[1]
    r0, r1, r2, r3, r4, r5, r6, r7 = _split8(_columns(real, 8))
    i0, i1, i2, i3, i4, i5, i6, i7 = _split8(_columns(imaginary, 8))
    HALF: tl.constexpr = 0.7071067811865476
    d0, e0, d2, e2 = r0 - r4, i0 - i4, i2 - i6, r6 - r2
    a, b, c, d = r1 - r5, i1 - i5, r3 - r7, i3 - i7
    d1, e1, d3, e3 = (a + b) * HALF, (b - a) * HALF, (d - c) * HALF, (c + d) * -HALF
    r0, i0, r2, i2, r4, i4, r6, i6 = _four(r0 + r4, i0 + i4, r1 + r5, i1 + i5, r2 + r6, i2 + i6, r3 + r7, i3 + i7)
    r1, i1, r3, i3, r5, i5, r7, i7 = _four(d0, e0, d1, e1, d2, e2, d3, e3)
    if 8 * DONE < N:
        c1, s1 = _factor(table, ROWS, N, 8, DONE)
        c2, s2 = product(c1, s1, c1, s1)
        c3, s3 = product(c2, s2, c1, s1)
        c4, s4 = product(c2, s2, c2, s2)
        r1, i1 = product(r1, i1, c1, s1)
        r2, i2 = product(r2, i2, c2, s2)
        r3, i3 = product(r3, i3, c3, s3)
        r4, i4 = product(r4, i4, c4, s4)
        c1, s1 = product(c4, s4, c1, s1)
        c2, s2 = product(c4, s4, c2, s2)
        c3, s3 = product(c4, s4, c3, s3)
        r5, i5 = product(r5, i5, c1, s1)
        r6, i6 = product(r6, i6, c2, s2)
        r7, i7 = product(r7, i7, c3, s3)
    real = tl.join(_join4(r0, r2, r4, r6), _join4(r1, r3, r5, r7))
    imaginary = tl.join(_join4(i0, i2, i4, i6), _join4(i1, i3, i5, i7))
    return _rows(real, ROWS, 8, DONE), _rows(imaginary, ROWS, 8, DONE)


@triton.jit
def _four(r0, i0, r1, i1, r2, i2, r3, i3):
    """Return the transform of four complex numbers."""
    a, b, c, d = r0 + r2, i0 + i2, r1 + r3, i1 + i3
    e, f, g, h = r0 - r2, i0 - i2, r1 - r3, i1 - i3
    return a + c, b + d, e + h, f - g, a - c, b - d, e - h, f + g


@triton.jit
def _columns(rows, EACH: tl.constexpr):
    """Return the numbers that a step transforms together, side by side: ``[ROWS * N / EACH, 2, ...]``."""
    ROWS: tl.constexpr = rows.shape[0]
    RUN: tl.constexpr = rows.shape[1] // EACH
    columns = tl.permute(tl.reshape(rows, [ROWS, EACH, RUN]), [0, 2, 1])
    if EACH == 8:
        columns = tl.reshape(columns, [ROWS * RUN, 2, 2, 2])
    elif EACH == 4:
        columns = tl.reshape(columns, [ROWS * RUN, 2, 2])
    else:
        columns = tl.reshape(columns, [ROWS * RUN, 2])
    return columns


@triton.jit
def _rows(columns, ROWS: tl.constexpr, EACH: tl.constexpr, DONE: tl.constexpr):
    """Return rows, in the order that the next step needs."""
    COUNT: tl.constexpr = columns.shape[0] // ROWS
    columns = tl.reshape(columns, [ROWS, COUNT // DONE, DONE, EACH])
    return tl.reshape(tl.permute(columns, [0, 1, 3, 2]), [ROWS, COUNT * EACH])


@triton.jit
def _split4(columns):
    even, odd = tl.split(columns)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _split8(columns):
    even, odd = tl.split(columns)
    a, c, e, g = _split4(even)
    b, d, f, h = _split4(odd)
    return a, b, c, d, e, f, g, h


@triton.jit
def _join4(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))
