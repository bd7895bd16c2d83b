"""GPU kernel of ``dgc.py``: a velocity in one pass. Bit-identical to its tensor operations."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import OPTIONS, kernel, read, write

_TILE = 2048


def accumulate(gradient: Tensor, old: Tensor, new: Tensor, momentum: float, nesterov: bool) -> None:
    """Write the next velocity to ``new``, and the step of SGD to ``gradient``.

    Both become ``momentum old + gradient``. Nesterov: ``new <- momentum (old + gradient)``, ``gradient += new``.

    Args:
        gradient: float32 ``[n]``.
        old: float32 ``[n]``.
        new: float32 ``[n]``; may be ``old``.
        momentum: is rounded to float32.
        nesterov: use Nesterov's rule.
    """
    if len(gradient):
        grid = (triton.cdiv(len(gradient), _TILE),)
        _accumulate[grid](gradient, old, new, float(momentum), len(gradient), nesterov, _TILE, **OPTIONS)


@kernel
def _accumulate(
    gradient, old, new, momentum, numel, NESTEROV: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    if (tl.program_id(0) + 1).to(tl.int64) * TILE <= numel:
        _accumulate_tile(gradient, old, new, momentum, numel, NESTEROV, TILE, True)
    else:
        _accumulate_tile(gradient, old, new, momentum, numel, NESTEROV, TILE, False)


@triton.jit
def _accumulate_tile(
    gradient, old, new, momentum, numel,
    NESTEROV: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < numel
    value, before = read(gradient, index, inside, WHOLE), read(old, index, inside, WHOLE)
    if NESTEROV:
        after = (before + value) * momentum
        write(gradient, index, value + after, inside, WHOLE)
    else:
        after = before * momentum + value
        write(gradient, index, after, inside, WHOLE)
    write(new, index, after, inside, WHOLE)
