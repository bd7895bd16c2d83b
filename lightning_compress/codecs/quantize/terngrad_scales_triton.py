"""The largest magnitude of each segment after clipping, in one launch; those that ``ternary.py`` finds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.quantize.levels_triton import fit
from lightning_compress.kernels.triton.launch import OPTIONS, Summands, kernel, read_sum, sources

Indices = npt.NDArray[np.int64]

_TILES = 1 << 13, 1 << 15
"""Elements that a program measures, less where a segment begins or ends: of short vectors, and of long ones."""
_LONG = 1 << 26
"""Elements of a long vector: so many programs' results would take a while to be added up."""
_ROWS = tl.constexpr(512)
"""Of four elements, which a program has in registers at a time."""
_PARTS = tl.constexpr(512)
"""Programs' results that are added up at a time."""


class Segments:
    """Measures segments, by programs that have a part of one each, of which the last one adds up what all have found.

    Args:
        edges: int64 ``[count + 1]``: where segments begin, of which none is empty, and where the last one ends.
        clips: how many standard deviations of each there are to the clipping, float64 ``[count]``, 0 for none; or None.
        device: where vectors are.

    Attributes:
        factors: float32 ``[count]``: what brings elements to 65536 at most, written by ``measure``.
    """

    def __init__(self, edges: Indices, clips: npt.NDArray[np.float64] | None, device: torch.device) -> None:
        count, numel = len(edges) - 1, int(edges[-1])
        self._tile = _TILES[numel >= _LONG]
        parts = np.union1d(np.arange(0, numel, self._tile), edges)
        self._programs = len(parts) - 1
        owners = np.searchsorted(edges, parts[:-1], "right") - 1
        self.edges = torch.from_numpy(edges).to(device)
        self._parts = torch.from_numpy(parts).to(device)
        self._owners = torch.from_numpy(owners.astype(np.int32)).to(device)
        self._ranges = torch.from_numpy(np.searchsorted(parts, edges).astype(np.int32)).to(device)
        self._clip = clips is not None
        self._clips = torch.zeros(count, dtype=torch.float64) if clips is None else torch.from_numpy(clips)
        self._clips = self._clips.to(device)
        self._found = torch.empty(3 if self._clip else 1, self._programs, dtype=torch.float64, device=device)
        self._done = torch.zeros(count, dtype=torch.int32, device=device)
        self.factors = torch.empty(count, dtype=torch.float32, device=device)

    def measure(self, vector: Tensor, summands: Summands, scales: Tensor) -> None:
        """Write the segments' scales, float32 ``[count]``, and their factors."""
        tables = self._parts, self._owners, self._ranges, self.edges, self._clips
        results = self._found, self._done, scales, self.factors
        first, second, both = sources(vector, summands)
        shape = self._tile, self._clip, both
        _measure[(self._programs,)](first, second, *tables, *results, self._programs, *shape, **OPTIONS)


@kernel(do_not_specialize=["programs"])
def _measure(
    first, second, parts, owners, ranges, edges, clips, found, done, scales, factors, programs,
    TILE: tl.constexpr, CLIP: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    start, stop, owner = tl.load(parts + part), tl.load(parts + part + 1), tl.load(owners + part)
    origin = tl.load(edges + owner)
    middle = read_sum(first, second, origin, True, SUM, True)
    if stop - start == TILE:
        largest, total, squares = _sums(first, second, start, stop, middle, TILE, CLIP, SUM, True)
    else:
        largest, total, squares = _sums(first, second, start, stop, middle, TILE, CLIP, SUM, False)
    tl.store(found + part, largest.to(tl.float64))
    if CLIP:
        tl.store(found + programs + part, total)
        tl.store(found + 2 * programs + part, squares)
    begin, end = tl.load(ranges + owner), tl.load(ranges + owner + 1)
    if tl.atomic_add(done + owner, 1, sem="acq_rel") == end - begin - 1:
        tl.store(done + owner, 0)
        count = tl.load(edges + owner + 1) - origin
        scale = _scale(found, programs, begin, end, count, tl.load(clips + owner), CLIP)
        sent, factor = fit(scale, 1.0, float("inf"))
        tl.store(scales + owner, sent)
        tl.store(factors + owner, factor)


@triton.jit
def _sums(
    first, second, start, stop, middle,
    TILE: tl.constexpr, CLIP: tl.constexpr, SUM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Of a part of a segment: the largest magnitude, and the sums of differences from ``middle`` and their squares."""
    largest = tl.zeros([_ROWS], tl.float32)
    total, squares = tl.zeros([_ROWS], tl.float64), tl.zeros([_ROWS], tl.float64)
    tile = start // TILE * TILE
    column = tl.arange(0, _ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for move in range(0, TILE, 4 * _ROWS):
        index = tile + move + column
        inside = (index >= start) & (index < stop)
        numbers = read_sum(first, second, index, inside, SUM, WHOLE)
        largest = tl.maximum(largest, tl.max(tl.abs(numbers), axis=1))
        if CLIP:
            wide = numbers.to(tl.float64) - middle.to(tl.float64)
            if not WHOLE:
                wide = tl.where(inside, wide, 0.0)
            total += tl.sum(wide, axis=1)
            squares += tl.sum(wide * wide, axis=1)
    return tl.max(largest, axis=0), tl.sum(total, axis=0), tl.sum(squares, axis=0)


@triton.jit
def _scale(found, programs, begin, end, count, clip, CLIP: tl.constexpr):
    """The largest magnitude of a segment after clipping, float64; what programs found is added up in their order.

    They ran elsewhere, so that nothing may be read from the cache nearest to here (".cg").
    """
    largest = tl.zeros([_PARTS], tl.float64)
    total, squares = tl.zeros([_PARTS], tl.float64), tl.zeros([_PARTS], tl.float64)
    while begin < end:
        index = begin + tl.arange(0, _PARTS)
        inside = index < end
        largest = tl.maximum(largest, tl.load(found + index, inside, 0.0, cache_modifier=".cg"))
        if CLIP:
            total += tl.load(found + programs + index, inside, 0.0, cache_modifier=".cg")
            squares += tl.load(found + 2 * programs + index, inside, 0.0, cache_modifier=".cg")
        begin += _PARTS
    scale = tl.max(largest, axis=0)
    if CLIP:
        numel = count.to(tl.float64)
        sums = tl.sum(total, axis=0)
        variance = (tl.sum(squares, axis=0) - sums * sums / numel) / numel
        clipped = tl.minimum(scale, tl.sqrt(tl.maximum(variance, 0.0)) * clip)
        scale = tl.where((variance > 0) & (clip > 0), clipped, scale)
    return scale
