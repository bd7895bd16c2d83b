"""CPU kernels of ``dense.py``, for many messages at once."""

from __future__ import annotations

import numpy as np

from lightning_compress.kernels.numba import kernel


@kernel
def encode_shards(vector, rows, messages):
    """Move the shards of ``rows``, int64 ``[shards, 3]``: start, elements, and first byte of the message."""
    for row in range(len(rows)):
        start, numel, at = rows[row, 0], rows[row, 1], rows[row, 2]
        messages[at : at + 4 * numel].view(np.float32)[:] = vector[start : start + numel]
        vector[start : start + numel] = 0


@kernel
def decode_shards(messages, rows, out, weight, accumulate):
    """Write the shards of ``rows`` times a factor, or add them."""
    for row in range(len(rows)):
        start, numel, at = rows[row, 0], rows[row, 1], rows[row, 2]
        numbers = messages[at : at + 4 * numel].view(np.float32)
        for index in range(numel):
            product = numbers[index] * weight
            out[start + index] = out[start + index] + product if accumulate else product
