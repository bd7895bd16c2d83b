"""Keys of random streams; the same as ``core/random.py``."""

from __future__ import annotations

import numpy as np

from lightning_compress.core.random import FACTORS, GAMMA
from lightning_compress.kernels.numba import kernel

_GAMMA, _FIRST, _SECOND = np.uint64(GAMMA), np.uint64(FACTORS[0]), np.uint64(FACTORS[1])


@kernel
def _mixed(key, part):
    word = key + np.uint64(part) + _GAMMA
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


@kernel
def shard_state(key, peer, section):
    """Return the state of the random words of a peer's section, uint64, from the key (uint64) without both."""
    own = _mixed(key, peer)
    if section != 0:
        own = _mixed(_mixed(np.uint64(0), own), -section)
    return _mixed(np.uint64(0), own)
