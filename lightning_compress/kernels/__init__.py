"""Twins of the hot loops, each a single pass; what they write equals what the codecs' own tensor operations write.

On the CPU they are compiled by numba, where it is installed (``pip install lightning_compress[cpu]``).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

TILE = 16
"""Neighbours that are handled as one; lengths that are multiples of it are fast."""


INFINITE = 0x7F800000
"""The bits of infinity; NaNs have more, and numbers fewer."""


def sound(largest: int) -> bool:
    """Whether the largest of some magnitudes, as the bits of a float32, is that of finite numbers, not all 0."""
    return 0 < largest < INFINITE


def of(device: torch.device) -> ModuleType | None:
    """The kernels for a device, or None: then tensor operations do the work."""
    return _cpu() if device.type == "cpu" else None


@cache
def _cpu() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    from lightning_compress.kernels import cpu  # a second, which only those pay who need it

    return cpu
