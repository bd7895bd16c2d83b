"""What ``composite.py`` does around reducers, by one launch before and one after.

A tile is three numbers: its place in the vector, that in the carried floats or -1, and how many elements it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import OPTIONS, kernel, read, write

_TILE = 2048
"""Elements per program."""


def table(spans: Sequence[slice], carried: int, device: torch.device) -> Tensor:
    """Cut slices of a vector into tiles.

    Args:
        spans: the slices.
        carried: where the first of them is in the carried floats, which hold them side by side; or -1: nowhere.
        device: where kernels read the tiles.

    Returns:
        int64 ``[tiles, 3]``.
    """
    tiles = []
    for span in spans:
        for start in range(span.start, span.stop, _TILE):
            numel = min(_TILE, span.stop - start)
            tiles.append((start, carried, numel))
            carried += numel if carried >= 0 else 0
    return torch.tensor(tiles, dtype=torch.int64).view(-1, 3).to(device)


def carry(vector: Tensor, flag: Tensor, tiles: Tensor, carried: Tensor) -> None:
    """Move tiles of a float32 vector to the carried floats, which begin with the flag. Zeros remain."""
    _carry[(len(tiles) + 1,)](vector, flag, tiles, carried, _TILE, **OPTIONS)


def finish(carried: Tensor, weight: float, tiles: Tensor, out: Tensor, flag: Tensor) -> None:
    """Write ``weight`` times the carried sums to ``out``, and find what is not finite, in them and in other tiles.

    Args:
        carried: float32, the sum of flags, then of dense elements; or empty.
        weight: is rounded to float32.
        tiles: of all of ``out``; those at -1 hold their means already.
        out: float32; becomes 0 where it is not finite.
        flag: float32 scalar, 0.0 or NaN; NaN if something is not finite.
    """
    if len(tiles):
        _finish[(len(tiles),)](carried, weight, tiles, out, flag, len(carried) > 0, _TILE, **OPTIONS)


@kernel
def _carry(vector, flag, tiles, carried, TILE: tl.constexpr):
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(carried, tl.load(flag))
    else:
        row = tiles + tl.program_id(0).to(tl.int64) * 3
        at = tl.arange(0, TILE)
        inside = at < tl.load(row + 2)
        source = vector + tl.load(row) + at
        tl.store(carried + tl.load(row + 1) + at, tl.load(source, mask=inside, other=0.0), mask=inside)
        tl.store(source, tl.zeros([TILE], tl.float32), mask=inside)


@kernel
def _finish(carried, weight, tiles, out, flag, FLAGGED: tl.constexpr, TILE: tl.constexpr):
    row = tiles + tl.program_id(0).to(tl.int64) * 3
    if FLAGGED:  # noqa: SIM102  # known when the kernel is compiled
        if (tl.program_id(0) == 0) & (tl.load(carried) * 0.0 != 0.0):  # True for NaN
            tl.store(flag, float("nan"))
    if tl.load(row + 2) == TILE:
        _finish_tile(carried, weight, row, out, flag, TILE, True)
    else:
        _finish_tile(carried, weight, row, out, flag, TILE, False)


@triton.jit
def _finish_tile(carried, weight, row, out, flag, TILE: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.arange(0, TILE)
    target, place, inside = out + tl.load(row), tl.load(row + 1), at < tl.load(row + 2)
    if place >= 0:
        values = read(carried + place, at, inside, WHOLE) * weight
    else:
        values = read(target, at, inside, WHOLE)
    finite = tl.abs(values) < float("inf")  # False for NaN
    sound = tl.min(finite.to(tl.int32), axis=0)
    if sound == 0:  # every program writes the same
        tl.store(flag, float("nan"))
    if (place >= 0) | (sound == 0):
        write(target, at, tl.where(finite, values, 0.0), inside, WHOLE)
