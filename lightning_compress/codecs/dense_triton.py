"""GPU kernels of ``dense.py``: one launch for any number of messages. Bit-identical to its tensor operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.core.random import Stream
from lightning_compress.kernels.triton.launch import OPTIONS, Summands, kernel, read, read_sum, sources, write

_TILE = 2048
"""Elements per program."""


class Floats:
    """Copies numbers; see ``Kernel``."""

    def encode(self, vector: Tensor, summands: Summands, message: Tensor, stream: Stream, keep: bool) -> None:
        """See ``Kernel``."""
        first, second, both = sources(vector, summands)
        numbers = message.view(torch.float32)
        _encode[_grid(vector)](first, second, vector, numbers, len(vector), both, keep, _TILE, **OPTIONS)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Kernel``."""
        inputs = messages, messages.stride(0), out, weight, len(out)
        _decode[_grid(out)](*inputs, accumulate, len(messages), _TILE, **OPTIONS)


def _grid(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(len(vector), _TILE),)


@kernel(do_not_specialize=["numel"])
def _encode(first, second, vector, numbers, numel, SUM: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr):
    index, inside = _indices(numel, TILE)
    write(numbers, index, read_sum(first, second, index, inside, SUM, False), inside, False)
    if KEEP:
        write(vector, index, tl.zeros([TILE], tl.float32), inside, False)


@kernel(do_not_specialize=["numel"])
def _decode(
    messages, stride: tl.int64, out, weight, numel, ADD: tl.constexpr, MESSAGES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    index, inside = _indices(numel, TILE)
    total = read(out, index, inside, False) if ADD else tl.zeros([TILE], tl.float32)
    factor = (tl.zeros([TILE], tl.float32) + weight).to(tl.float64)
    for message in range(MESSAGES):
        numbers = read((messages + message * stride).to(tl.pointer_type(tl.float32)), index, inside, False)
        # the product is exact in float64, so that it is rounded once, with the sum
        total = (numbers.to(tl.float64) * factor + total.to(tl.float64)).to(tl.float32)
    write(out, index, total, inside, False)


@triton.jit
def _indices(numel, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    return index, index < numel
