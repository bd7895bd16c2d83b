"""CPU kernel of ``correction.py``."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel


@kernel
def zero_where_zero(target, source):
    """Set ``target`` to 0 where ``source`` is 0; both float32 ``[n]``."""
    for index in range(len(source)):
        target[index] = target[index] if source[index] != 0 else np.float32(0)
