"""The numbers that all randomness comes from: counter-based, so there is no generator state to save."""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Hash integers into an unsigned 64-bit key (splitmix64, Steele et al., OOPSLA 2014)."""
    key = 0
    for part in parts:
        key = (key + part + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def name_key(names: tuple[str, ...]) -> int:
    """Key of an ordered list of parameter names, the same in every process."""
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8], "little")
