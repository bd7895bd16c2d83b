"""Zeroes elements where another vector is 0; see ``base.py``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel


@kernel
def zero_where_zero(target, source):
    """``target`` becomes 0 where ``source`` is; both float32 ``[n]``."""
    for index in range(len(source)):
        target[index] = target[index] if source[index] != 0 else np.float32(0)
