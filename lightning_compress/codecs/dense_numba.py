"""CPU kernels of ``dense.py``, for many messages at once."""

from __future__ import annotations

import numpy as np

from lightning_compress.core.source_numba import begin_write, end_write, load
from lightning_compress.kernels.numba import kernel

_TILE = 4096
"""Elements at a time."""


@kernel
def encode_shards(source, rows, messages, rest):
    """Move the shards of ``rows``, int64 ``[shards, 3]``: start, elements, and first byte of the message."""
    most = np.int32(0)
    for row in range(len(rows)):
        start, numel, at = rows[row, 0], rows[row, 1], rows[row, 2]
        most = max(most, load(source, start, start + numel, messages[at : at + 4 * numel].view(np.float32)))
        rest[start : start + numel] = 0
    return most


@kernel
def decode_shards(messages, rows, out, weight, accumulate):
    """Write the shards of ``rows`` times a factor, or add them."""
    room = np.empty(_TILE, np.float32)
    for row in range(len(rows)):
        start, numel, at = rows[row, 0], rows[row, 1], rows[row, 2]
        numbers = messages[at : at + 4 * numel].view(np.float32)
        for first in range(0, numel, _TILE):
            last = min(first + _TILE, numel)
            part = begin_write(out, start + first, start + last, room, accumulate)
            for index in range(last - first):
                product = numbers[first + index] * weight
                part[index] = part[index] + product if accumulate else product
            end_write(out, start + first, start + last, part)
