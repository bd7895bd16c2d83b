"""Copy gradients into a vector, or add a residual to them; see ``vector.py``."""

from __future__ import annotations

import numpy as np

from lightning_compress.core.blocks import AVERAGE, BLOCK
from lightning_compress.core.blocks_numba import add_to
from lightning_compress.kernels.numba import kernel

_AVERAGE, _BLOCK = AVERAGE, BLOCK


@kernel
def read(numbers, bits, rows, begin, addend, out):
    """Copy a part of a vector from where the gradients lie, and add a residual to it.

    Args:
        numbers: float32, the memory that holds the gradients.
        bits: the same memory as int32.
        rows: from ``blocks.table``, in the vector's order.
        begin: the part's first element in the vector.
        addend: float32 ``[n]``, or empty for none.
        out: float32 ``[n]``, overwritten.

    Returns:
        the largest magnitude of the part's gradients, as the bits of a float32: as integers, NaN and infinity are above
        all others.
    """
    most, end = np.int32(0), begin + len(out)
    for row in range(len(rows)):
        source, start, count = rows[row, 0], rows[row, 1], rows[row, 2]
        first, last = max(begin, start), min(end, start + count)
        if first < last:
            place = slice(source + first - start, source + last - start)
            part = out[first - begin : last - begin]
            if len(addend):
                largest = _add(numbers[place], bits[place], addend[first - begin : last - begin], part)
            else:
                largest = _copy(numbers[place], bits[place], part)
            most = max(most, largest)
    return most


@kernel
def _add(gradient, bits, residual, out):
    largest = np.int32(0)
    for index in range(len(gradient)):
        out[index] = gradient[index] + residual[index]
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest


@kernel
def gather(numbers, bits, rows, coded, out):
    """Copy gradients into a vector, and add coded errors to them.

    Args:
        numbers: float32, the memory that holds the gradients.
        bits: the same memory as int32.
        rows: from ``blocks.table``. Errors are added where they are to be averaged.
        coded: uint8, the codes of the errors; may be empty if no row has any.
        out: float32 ``[numel]``, overwritten.

    Returns:
        the largest magnitude of the gradients, as ``read`` returns it.
    """
    most, codes = np.int32(0), coded.view(np.int8)
    for row in range(len(rows)):
        source, start, count, code, scale = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        given, words, part = numbers[source : source + count], bits[source : source + count], out[start : start + count]
        if code >= 0 and rows[row, 5] == _AVERAGE:
            scales = coded[scale : scale - (-count // _BLOCK)]
            largest = add_to(codes[code : code + count], scales, given, words, part)
        else:
            largest = _copy(given, words, part)
        most = max(most, largest)
    return most


@kernel
def _copy(gradient, bits, out):
    largest = np.int32(0)
    for index in range(len(gradient)):
        out[index] = gradient[index]
        largest = max(largest, bits[index] & np.int32(0x7FFFFFFF))
    return largest
