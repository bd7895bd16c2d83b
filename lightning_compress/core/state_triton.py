"""Conditional copies, to roll values back if a flag is set; see ``state.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import OPTIONS, kernel

_TILE = 2048
"""Elements per program."""


def replace(condition: Tensor, target: Tensor, source: Tensor) -> None:
    """Set ``target = source``, of one dtype and length, if the bool scalar ``condition`` is true."""
    if len(target):
        _replace[(triton.cdiv(len(target), _TILE),)](condition, target, source, len(target), _TILE, **OPTIONS)


@kernel
def _replace(condition, target, source, numel, TILE: tl.constexpr):
    if tl.load(condition).to(tl.int32) != 0:
        index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        tl.store(target + index, tl.load(source + index, mask=index < numel), mask=index < numel)
