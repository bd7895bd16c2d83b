"""Find and spread non-finite values; see ``vector.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.core.blocks import AVERAGE, Segments, table
from lightning_compress.core.blocks_triton import decoded
from lightning_compress.kernels.triton.launch import OPTIONS, kernel, read

_AVERAGE = tl.constexpr(AVERAGE)

_TILE = 2048
"""Elements per program."""


def gather(first: Tensor, segments: Segments, codes: Tensor, out: Tensor, limit: float, flag: Tensor) -> None:
    """Copy gradients into a vector, zeros where they are not finite, and add the errors that are to be averaged.

    Args:
        first: the gradient at the lowest address, of any floating-point dtype.
        segments: of the vector; ``sources`` count elements from ``first`` on.
        codes: uint8, of all errors.
        out: float32 ``[numel]``, overwritten; may be ``first``.
        limit: the largest allowed magnitude of a gradient; may be infinite.
        flag: float32 scalar, 0.0; becomes NaN if a larger value was found.
    """
    rows, coded = table(segments, _TILE, out.device), AVERAGE in segments.treated
    if len(rows):
        _gather[(len(rows),)](first, rows, codes, out, limit, flag, coded, _TILE, **OPTIONS)


def scatter(mean: Tensor, segments: Segments, flag: Tensor, first: Tensor) -> None:
    """Copy a vector's parts to where the gradients are, plus the float32 scalar ``flag``; see ``gather``."""
    rows = table(segments, _TILE, mean.device)
    if len(rows):
        _scatter[(len(rows),)](mean, rows, flag, first, _TILE, **OPTIONS)


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
def _gather(first, rows, codes, out, limit, flag, CODED: tl.constexpr, TILE: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 6
    at = tl.arange(0, TILE)
    inside = at < tl.load(row + 2)
    values = tl.load(first + tl.load(row) + at, mask=inside, other=0.0).to(tl.float32)
    finite, sound = _check(values, limit)
    if sound == 0:
        tl.store(flag, float("nan"))
        values = tl.where(finite, values, 0.0)
    if CODED:  # noqa: SIM102  # known when the kernel is compiled
        if tl.load(row + 5) == _AVERAGE:
            values += decoded(codes, tl.load(row + 3), tl.load(row + 4), at, inside)
    tl.store(out + tl.load(row + 1) + at, values, mask=inside)


@kernel
def _scatter(mean, rows, flag, first, TILE: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 6
    at = tl.arange(0, TILE)
    inside = at < tl.load(row + 2)
    values = tl.load(mean + tl.load(row + 1) + at, mask=inside, other=0.0) + tl.load(flag)
    tl.store(first + tl.load(row) + at, values.to(first.dtype.element_ty), mask=inside)


@triton.jit
def _check(values, limit):
    """Return which values are finite, and 1 if all are and none is above the limit, else 0."""
    magnitudes = tl.abs(values)
    finite = magnitudes < float("inf")  # False for NaN
    return finite, tl.min((finite & (magnitudes <= limit)).to(tl.int32), axis=0)


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
    finite, sound = _check(values, limit)
    if sound == 0:  # every program writes the same
        tl.store(flag, float("nan"))
        tl.store(numbers + index, tl.where(finite, values, 0.0), mask=index < numel)


@kernel
def _add_flag(flag, target, numel, TILE: tl.constexpr):
    value = tl.load(flag)
    if value != 0.0:  # True for NaN
        index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        tl.store(target + index, tl.load(target + index, mask=index < numel) + value, mask=index < numel)
