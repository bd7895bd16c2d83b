"""What is forgotten where another vector is 0; see ``base.py``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel, simd
from lightning_compress.kernels.numba.bits import lowest, without_lowest


@kernel
def zero_where_zero(target, source):
    """``target`` becomes 0 where ``source`` is; both float32 ``[n]``."""
    place = 0
    while place + 32 <= len(source):
        word = np.uint32(0xFFFFFFFF) - simd.nonzero(source, place)
        while word:
            target[place + lowest(word)] = 0
            word = without_lowest(word)
        place += 32
    while place < len(source):
        if source[place] == 0:
            target[place] = 0
        place += 1
