"""Values in 8 bits each, read and written in one pass; the same bits as ``blocks.py``."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lightning_compress.core.blocks import AVERAGE, KEEP, Segments, table
from lightning_compress.kernels.numba import copy, kernel, simd

_BLOCK, _LEAST, _MOST = 64, 6, 253
_KEEP, _AVERAGE = KEEP, AVERAGE
_AHEAD = 2048
"""Elements by which ``blend`` prefetches memory: a quarter less time than with the processor's own prefetching."""
_EXPONENTS = np.arange(256, dtype=np.int32)
_VALID = (_EXPONENTS > _LEAST) & (_EXPONENTS <= _MOST)
_STEPS = (np.where(_VALID, _EXPONENTS - _LEAST, 0).astype(np.int32) << 23).view(np.float32)
_INVERSES = (np.where(_VALID, 260 - _EXPONENTS, 0).astype(np.int32) << 23).view(np.float32)


@kernel
def add_to(codes, scales, begin, numbers, out):
    """Compute ``out = numbers + coded`` for a part of a parameter.

    Args:
        codes: int8 ``[n]``, of the part.
        scales: uint8, the exponents of the parameter's blocks.
        begin: the part's first element.
        numbers: float32 ``[n]``.
        out: float32 ``[n]``, overwritten; may be the numbers.
    """
    index = 0
    while index < len(out):
        step = _STEPS[scales[(begin + index) // _BLOCK]]
        end = min(len(out), index + _BLOCK - (begin + index) % _BLOCK)
        if end - index == _BLOCK:
            simd.add_block(out, index, codes, index, numbers, index, step)
        else:
            for place in range(index, end):
                out[place] = numbers[place] + np.float32(codes[place]) * step
        index = end


def blend(segments: Segments, old: Tensor, kept: float, values: Tensor, share: float, new: Tensor) -> None:
    """See ``blocks.py``."""
    rows = table(segments, None, values.device).numpy()
    _blend_all(rows, old.numpy(), np.float32(kept), values.numpy(), np.float32(share), new.numpy())


@kernel
def _blend_all(rows, old, kept, values, share, new):
    codes, new_codes = old.view(np.int8), new.view(np.int8)
    for row in range(len(rows)):
        start, count, code, scale = rows[row, 1], rows[row, 2], rows[row, 3], rows[row, 4]
        if code < 0:
            continue
        stop, scaled = code + count, scale - (-count // _BLOCK)
        if rows[row, 5] == _KEEP:
            copy(old[code:scaled], new[code:scaled])
            continue
        part = values[start : start + count]
        factor = kept if rows[row, 5] == _AVERAGE else np.float32(0)
        _blend(codes[code:stop], old[scale:scaled], factor, part, share, new_codes[code:stop], new[scale:scaled])


@kernel
def _blend(codes, scales, kept, values, share, new_codes, new_scales):
    """Compute ``new = kept * old + share * values``; see ``blocks.py``."""
    whole = len(values) // _BLOCK * _BLOCK
    for number in range(whole // _BLOCK):
        first = number * _BLOCK
        factor = _STEPS[scales[number]] * kept
        for row in range(first, first + _BLOCK, simd.LANES):
            simd.fetch(values, row + _AHEAD)
        simd.fetch(codes, first + _AHEAD)
        new_scales[number] = simd.blend_codes(new_codes, first, codes, first, values, first, factor, share)
    if whole < len(values):
        tile = np.zeros(_BLOCK, np.float32)
        factor = _STEPS[scales[-1]] * kept
        for index in range(whole, len(values)):
            tile[index - whole] = np.float32(codes[index]) * factor + values[index] * share
        exponent = np.abs(tile).view(np.int32).max() >> 23
        new_scales[-1] = exponent if _LEAST < exponent <= _MOST else 0
        for index in range(whole, len(values)):
            nearest = np.rint(tile[index - whole] * _INVERSES[exponent])
            new_codes[index] = np.int8(np.int32(min(max(nearest, np.float32(-127)), np.float32(127))))
