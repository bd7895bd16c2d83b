"""What is forgotten where another vector is 0; see ``base.py``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel, simd
from lightning_compress.kernels.numba.bits import lowest, without_lowest


@kernel
def zero_where_zero(target, source):
    """``target`` becomes 0 where ``source`` is; both float32 ``[n]``."""
    index = 0
    while index + 32 <= len(source):
        word = np.uint32(0xFFFFFFFF) - simd.nonzero(source, index)
        while word:
            target[index + lowest(word)] = 0
            word = without_lowest(word)
        index += 32
    while index < len(source):
        if source[index] == 0:
            target[index] = 0
        index += 1
