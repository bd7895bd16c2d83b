"""Lists of places and numbers, added to a vector; see ``codecs/topk.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import OPTIONS

_CHUNK = 1024


def add(indices: Tensor, values: Tensor, out: Tensor, weight: float) -> None:
    """``out[indices] += weight * values``, where a value is not 0.

    Args:
        indices: int32 ``[k]``; no place has two values that are not 0. Places beyond the vector are moved inside.
        values: float32 or float16 ``[k]``.
        out: float32 ``[n]``, n > 0.
        weight: rounded to float32.
    """
    if len(indices):
        grid = (triton.cdiv(len(indices), _CHUNK),)
        _add[grid](indices, values, out, weight, len(indices), len(out) - 1, _CHUNK, **OPTIONS)


@triton.jit
def _add(indices, values, out, weight, count, last, CHUNK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(values + number, mask=number < count, other=0.0).to(tl.float32)
    filled = value != 0
    place = tl.load(indices + number, mask=filled, other=0)
    place = tl.minimum(tl.maximum(place, 0), last)
    total = tl.load(out + place, mask=filled, other=0.0) + value * weight
    tl.store(out + place, total, mask=filled)
