"""Find and spread non-finite values; see ``vector.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import OPTIONS, kernel, read

_TILE = 2048
"""Elements per program."""


def clean(numbers: Tensor, limit: float, flag: Tensor) -> None:
    """Find values that are not finite or above a limit, and overwrite those that are not finite with 0.0.

    Args:
        numbers: float32 ``[n]``.
        limit: the largest allowed magnitude; may be infinite.
        flag: float32 scalar, 0.0; becomes NaN if a value was found.
    """
    if len(numbers):
        _clean[(triton.cdiv(len(numbers), _TILE),)](numbers, limit, flag, len(numbers), _TILE, **OPTIONS)


def add_flag(flag: Tensor, target: Tensor) -> None:
    """Add a float32 scalar to float32 ``target [n]``; if it is 0.0, as in most steps, ``target`` is not touched."""
    if len(target):
        _add_flag[(triton.cdiv(len(target), _TILE),)](flag, target, len(target), _TILE, **OPTIONS)


@kernel
def _clean(numbers, limit, flag, numel, TILE: tl.constexpr):
    if (tl.program_id(0) + 1).to(tl.int64) * TILE <= numel:
        _clean_tile(numbers, limit, flag, numel, TILE, True)
    else:
        _clean_tile(numbers, limit, flag, numel, TILE, False)


@triton.jit
def _clean_tile(numbers, limit, flag, numel, TILE: tl.constexpr, WHOLE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = read(numbers, index, index < numel, WHOLE)
    magnitudes = tl.abs(values)
    finite = magnitudes < float("inf")  # False for NaN
    sound = tl.min((finite & (magnitudes <= limit)).to(tl.int32), axis=0)
    if sound == 0:  # every program writes the same
        tl.store(flag, float("nan"))
        tl.store(numbers + index, tl.where(finite, values, 0.0), mask=index < numel)


@kernel
def _add_flag(flag, target, numel, TILE: tl.constexpr):
    value = tl.load(flag)
    if value != 0.0:  # True for NaN
        index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        tl.store(target + index, tl.load(target + index, mask=index < numel) + value, mask=index < numel)
