"""What all kernels are launched with, and the pieces that several are made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels import Summands

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}
"""Products and sums are rounded one by one, as everywhere else."""


def kernel(function: Callable[..., None] | None = None, **settings: Any) -> Any:
    """A kernel that is launched on the device of its tensors; Triton takes the current one, which may be another.

    Args:
        function: the kernel; its arguments begin with tensors.
        **settings: of ``triton.jit``.
    """
    if function is None:
        return partial(kernel, **settings)
    compiled = triton.jit(function, **settings)

    def run(*given: Any, **options: Any) -> Any:
        with torch.cuda.device_of(given[0]):
            return type(compiled).run(compiled, *given, **options)

    compiled.run = run
    return compiled


def sources(vector: Tensor, summands: Summands) -> tuple[Tensor, Tensor, bool]:
    """What ``load`` takes: two tensors, and whether they are to be added up."""
    return (vector, vector, False) if summands is None else (*summands, True)


def width_of(count: int) -> int:
    """The next power of two, which is what a tile can have."""
    return triton.next_power_of_2(max(1, count))


def float_view(message: Tensor, start: int, count: int) -> Tensor:
    """``count`` float32 numbers of a message (uint8), or of each row of messages, from the byte ``start`` on."""
    part = message[..., start : start + 4 * count]
    if part.dim() == 2 and len(part) == 1:  # whose stride, any number of bytes, torch would look at
        return part[0].view(torch.float32)[None]
    return part.view(torch.float32)


@triton.jit
def read(numbers, index, inside, WHOLE: tl.constexpr):
    """What is there, and 0 outside. Only without a mask (``WHOLE``) does the compiler read 16 bytes at a time."""
    if WHOLE:
        found = tl.load(numbers + index)
    else:
        found = tl.load(numbers + index, mask=inside, other=0)
    return found


@triton.jit
def write(numbers, index, values, inside, WHOLE: tl.constexpr):
    """Write what is inside; see ``read``."""
    if WHOLE:
        tl.store(numbers + index, values)
    else:
        tl.store(numbers + index, values, mask=inside)


@triton.jit
def read_sum(first, second, index, inside, SUM: tl.constexpr, WHOLE: tl.constexpr):
    """The vector's numbers: those of ``first``, or sums of both; see ``sources`` and ``read``."""
    numbers = read(first, index, inside, WHOLE)
    if SUM:
        numbers += read(second, index, inside, WHOLE)
    return numbers


@triton.jit
def clear(gap, padding):
    """Write zeros between a message's header and its codes, fewer than 16."""
    zeros = tl.arange(0, 16)
    tl.store(gap + zeros, tl.zeros([16], tl.uint8), mask=zeros < padding)


@triton.jit
def indices(number, numel, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Where the elements of blocks stand, ``[ROWS, WIDTH]``, and whether they are any."""
    column = tl.arange(0, WIDTH)
    index = number[:, None] * BLOCK + column[None, :]
    return index, (column < BLOCK)[None, :] & (index < numel)


@triton.jit
def pack(codes, WIDTH: tl.constexpr):
    """Pack codes of ``WIDTH`` bits (1, 2 or 4), int32 ``[ROWS, n]``, the first one lowest, into uint8 ``[ROWS, m]``."""
    EACH: tl.constexpr = 8 // WIDTH
    parts = tl.reshape(codes, [codes.shape[0], codes.shape[1] // EACH, EACH])
    return tl.sum(parts << (tl.arange(0, EACH) * WIDTH)[None, None, :], axis=2).to(tl.uint8)


@triton.jit
def unpack(packed, WIDTH: tl.constexpr):
    """The codes again, int32 ``[ROWS, n]``, of uint8 ``[ROWS, m]``.

    A reshape, and no index of None, leaves them in the thread that has read their byte.
    """
    EACH: tl.constexpr = 8 // WIDTH
    parts = tl.reshape(packed, [packed.shape[0], packed.shape[1], 1]).to(tl.int32)
    parts = (parts >> (tl.arange(0, EACH) * WIDTH)[None, None, :]) & (2**WIDTH - 1)
    return tl.reshape(parts, [packed.shape[0], packed.shape[1] * EACH])
