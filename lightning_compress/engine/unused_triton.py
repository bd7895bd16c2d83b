"""Checks and changes to the parameters of a vector, one by one, all in one launch.

A table lists for each program the index of its parameter, its first element, and one past its last element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import OPTIONS, kernel

TILE = 4096
"""Elements per program, at most."""


def table(parts: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Cut parts of a vector, given as (index, start, stop), into tiles.

    Returns:
        int64 ``[tiles, 3]``: index, start and stop.
    """
    rows = [
        (index, start, min(start + TILE, stop)) for index, first, stop in parts for start in range(first, stop, TILE)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 3)


def find_used(tiles: Tensor, used: Tensor, *vectors: Tensor) -> None:
    """Set uint8 ``used [parts]`` to 1 where a part of one or two float32 vectors ``[n]`` has a nonzero element.

    Parts that are already marked as used are hardly read.
    """
    if len(tiles):
        _find_used[(len(tiles),)](tiles, used, vectors[0], vectors[-1], len(vectors), TILE, **OPTIONS)


def zero_unused(tiles: Tensor, used: Tensor, *vectors: Tensor) -> None:
    """Zero the unused parts of one or two float32 vectors ``[n]``; the others are not read."""
    if len(tiles):
        _zero_unused[(len(tiles),)](tiles, used, vectors[0], vectors[-1], len(vectors), TILE, **OPTIONS)


def restore_unused(tiles: Tensor, used: Tensor, vector: Tensor, kept: Tensor) -> None:
    """Copy the unused parts of ``kept [n]`` to ``vector [n]``, which may have another dtype."""
    if len(tiles):
        _restore_unused[(len(tiles),)](tiles, used, vector, kept, TILE, **OPTIONS)


@triton.jit
def _tile(tiles, SIZE: tl.constexpr):
    row = tiles + tl.program_id(0).to(tl.int64) * 3
    index = tl.load(row + 1) + tl.arange(0, SIZE)
    return tl.load(row), index, index < tl.load(row + 2)


@kernel
def _find_used(tiles, used, first, second, COUNT: tl.constexpr, SIZE: tl.constexpr):
    part, index, inside = _tile(tiles, SIZE)
    if tl.load(used + part) == 0:
        found = tl.load(first + index, mask=inside, other=0.0) != 0
        if COUNT == 2:
            found |= tl.load(second + index, mask=inside, other=0.0) != 0
        if tl.max(found.to(tl.int32), axis=0) != 0:  # every program writes the same
            tl.store(used + part, 1)


@kernel
def _zero_unused(tiles, used, first, second, COUNT: tl.constexpr, SIZE: tl.constexpr):
    part, index, inside = _tile(tiles, SIZE)
    if tl.load(used + part) == 0:
        tl.store(first + index, tl.zeros([SIZE], tl.float32), mask=inside)
        if COUNT == 2:
            tl.store(second + index, tl.zeros([SIZE], tl.float32), mask=inside)


@kernel
def _restore_unused(tiles, used, vector, kept, SIZE: tl.constexpr):
    part, index, inside = _tile(tiles, SIZE)
    if tl.load(used + part) == 0:
        numbers = tl.load(kept + index, mask=inside, other=0.0)
        tl.store(vector + index, numbers, mask=inside)  # cast where they differ
