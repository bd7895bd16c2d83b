"""Walsh-Hadamard transforms of columns in registers; see ``codecs/hadamard.py``, whose bits these are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def transform(tile):
    """``H x`` for every column of ``tile``, float32 ``[ROWS, COLUMNS]``, both powers of two."""
    return _steps(tile, 1)


@triton.jit
def _steps(tile, DISTANCE: tl.constexpr):
    """The steps from this distance on: ``a, b`` become ``a + b, (a + b) - 2 b``.

    A sum of two is one addition, in a thread or by a shuffle, wherever the compiler has put the two.
    """
    ROWS: tl.constexpr = tile.shape[0]
    RUN: tl.constexpr = DISTANCE * tile.shape[1]
    if DISTANCE < ROWS:
        pairs = tl.reshape(tile, [ROWS // (2 * DISTANCE), 2, RUN])
        total = tl.sum(pairs, axis=1, keep_dims=True)
        lower = (tl.arange(0, 2) == 1)[None, :, None]
        other = tl.fma(pairs, tl.full(pairs.shape, -2.0, tl.float32), total)  # a product by 2 is exact
        tile = tl.reshape(tl.where(lower, other, total), tile.shape)
        tile = _steps(tile, 2 * DISTANCE)
    return tile
