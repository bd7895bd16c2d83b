"""Values in 8 bits each, on a GPU; the same bits as ``blocks.py``."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.core.blocks import AVERAGE, BLOCK, KEEP, RESET, Segments, table
from lightning_compress.core.told import Bits
from lightning_compress.core.told_triton import is_used
from lightning_compress.kernels.triton.launch import OPTIONS, kernel, width_of

_BLOCK, _KEEP, _AVERAGE = tl.constexpr(BLOCK), tl.constexpr(KEEP), tl.constexpr(AVERAGE)
_LEAST, _MOST = tl.constexpr(6), tl.constexpr(253)
_ROUND = tl.constexpr(1.5 * 2**23)
"""Adding and subtracting it rounds a float32 below 2^22 to the nearest integer, to even in the middle."""
_TILE = 2048
"""Elements per program."""


def blend(
    segments: Segments, old: Tensor, kept: float, values: Tensor, share: float, new: Tensor, bits: Bits | None = None
) -> None:
    """See ``blocks.py``."""
    memory, count = (bits.memory, len(bits.memory)) if bits else (old[None], 0)
    rows = table(segments, _TILE, values.device)
    places = _bits(segments, bits.kept, bits.places, values.device) if bits else rows
    if len(rows) and {RESET, AVERAGE} & set(segments.treated):
        constants = count, width_of(count), _TILE // BLOCK
        _blend[(len(rows),)](
            old, rows, kept, values, share, new, places, memory, memory.stride(0), *constants, **OPTIONS
        )
    elif len(rows):
        new.copy_(old)


@lru_cache(maxsize=4096)
def _bits(segments: Segments, kept: tuple[int, ...], bits: tuple[int, ...], device: torch.device) -> Tensor:
    """Return both bits of each row of the segments' table, int64 ``[rows, 2]``."""
    sizes = zip(kept, bits, segments.sizes, strict=True)
    rows = [both for *both, size in sizes for _ in range(0, size, _TILE)]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(device)


@triton.jit
def decoded(codes, code, scale, at, inside):
    """Return the values of the elements ``at``, float32, of a part whose codes and exponents start at these bytes."""
    exponents = tl.load(codes + scale + at // _BLOCK, mask=inside, other=0).to(tl.int32)
    numbers = tl.load(codes + code + at, mask=inside, other=0).to(tl.int8, bitcast=True)
    return numbers.to(tl.float32) * _power(exponents - _LEAST, exponents)


@triton.jit
def _power(power, exponents):
    """Return the powers of two with these float32 exponents; 0 where the block's exponent is not valid."""
    valid = (exponents > _LEAST) & (exponents <= _MOST)
    return (tl.where(valid, power, 0) << 23).to(tl.float32, bitcast=True)


@kernel
def _blend(
    old, rows, kept, values, share, new, places, used, step: tl.int64,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0).to(tl.int64) * 6
    start, count = tl.load(row + 1), tl.load(row + 2)
    code, scale, treated = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside, within = at < count, block * _BLOCK < count
    sent = inside
    if COUNT:  # known when the kernel is compiled
        bits = places + tl.program_id(0) * 2
        treated = tl.where(is_used(used, step, tl.load(bits), COUNT, WIDTH), treated, _KEEP)
        sent = inside & is_used(used, step, tl.load(bits + 1), COUNT, WIDTH)
    if code >= 0:
        if treated == _KEEP:
            tl.store(new + code + at, tl.load(old + code + at, mask=inside), mask=inside)
            tl.store(new + scale + block, tl.load(old + scale + block, mask=within), mask=within)
        else:
            blended = tl.load(values + start + at, mask=sent, other=0.0) * share
            if treated == _AVERAGE:
                blended += decoded(old, code, scale, at, inside) * kept
            exponents = tl.max(tl.abs(blended), axis=1).to(tl.int32, bitcast=True) >> 23
            valid = (exponents > _LEAST) & (exponents <= _MOST)
            scaled = blended * _power(260 - exponents, exponents)[:, None]
            rounded = tl.minimum(tl.maximum((scaled + _ROUND) - _ROUND, -127.0), 127.0)
            tl.store(new + code + at, rounded.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside)
            tl.store(new + scale + block, tl.where(valid, exponents, 0).to(tl.uint8), mask=within)
