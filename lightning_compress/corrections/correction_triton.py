"""GPU kernel of ``correction.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import OPTIONS, kernel

_TILE = 2048


def zero_where_zero(target: Tensor, source: Tensor) -> None:
    """Set ``target`` to 0 where ``source`` is 0; both float32 ``[n]``."""
    if len(source):
        _zero_where_zero[(triton.cdiv(len(source), _TILE),)](target, source, len(source), _TILE, **OPTIONS)


@kernel
def _zero_where_zero(target, source, numel, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if (tl.program_id(0) + 1).to(tl.int64) * TILE <= numel:
        zero = tl.load(source + index) == 0
    else:
        zero = tl.load(source + index, mask=index < numel, other=1.0) == 0
    tl.store(target + index, tl.zeros([TILE], tl.float32), mask=zero)
