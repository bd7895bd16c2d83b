"""Numbers in 8 bits each, read and written in one pass; see ``blocks.py``, whose bits these are."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels.triton.launch import OPTIONS, indices, kernel

_BLOCK, _ROWS = tl.constexpr(64), tl.constexpr(32)
"""Numbers that share a scale, and such blocks of a program."""
_LEAST, _MOST, _SHIFT = tl.constexpr(6), tl.constexpr(253), tl.constexpr(23)
_NEAREST = tl.constexpr(1.5 * 2**23)
"""Added and taken away, it leaves a smaller number rounded to the nearest, ties to the even one."""


def add(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Add int8 ``codes [n]`` with uint8 ``scales [blocks]`` to float32 ``out [n]``."""
    if len(out):
        _add[_grid(out)](out, codes, scales, len(out), **OPTIONS)


def blend(
    codes: Tensor, scales: Tensor, kept: float, values: Tensor, share: float, new_codes: Tensor, new_scales: Tensor
) -> None:
    """``new = kept * old + share * values``; see ``blocks.py``."""
    if len(values):
        given = codes, scales, kept, values, share
        _blend[_grid(values)](*given, new_codes, new_scales, len(values), **OPTIONS)


def _grid(numbers: Tensor) -> tuple[int]:
    return (triton.cdiv(len(numbers), _BLOCK.value * _ROWS.value),)


@kernel
def _add(out, codes, scales, numel: tl.int64):
    number, index, inside = _tile(numel)
    numbers = tl.load(out + index, mask=inside)
    tl.store(out + index, numbers + _read(codes, scales, number, index, inside, numel), mask=inside)


@kernel(do_not_specialize=["kept", "share"])
def _blend(codes, scales, kept, values, share, new_codes, new_scales, numel: tl.int64):
    number, index, inside = _tile(numel)
    old = _read(codes, scales, number, index, inside, numel)
    mixed = old * kept + tl.load(values + index, mask=inside, other=0.0) * share
    exponents = tl.max(tl.abs(mixed), axis=1).to(tl.int32, bitcast=True) >> _SHIFT
    exponents = tl.where(_valid(exponents), exponents, 0)
    scaled = mixed * _power(260 - exponents, exponents > 0)[:, None]
    rounded = tl.minimum(tl.maximum((scaled + _NEAREST) - _NEAREST, -127.0), 127.0)
    tl.store(new_codes + index, rounded.to(tl.int8), mask=inside)
    tl.store(new_scales + number, exponents.to(tl.uint8), mask=number * _BLOCK < numel)


@triton.jit
def _tile(numel):
    """The numbers of a program's blocks, where their elements stand, and whether they are any."""
    number = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    index, inside = indices(number, numel, _BLOCK, _BLOCK)
    return number, index, inside


@triton.jit
def _read(codes, scales, number, index, inside, numel):
    exponents = tl.load(scales + number, mask=number * _BLOCK < numel, other=0).to(tl.int32)
    steps = _power(exponents - _LEAST, _valid(exponents))
    return tl.load(codes + index, mask=inside, other=0).to(tl.float32) * steps[:, None]


@triton.jit
def _valid(exponents):
    return (exponents > _LEAST) & (exponents <= _MOST)


@triton.jit
def _power(exponents, valid):
    """The powers of two with these exponents of a float32; 0 where they are not valid."""
    return (tl.where(valid, exponents, 0) << _SHIFT).to(tl.float32, bitcast=True)
