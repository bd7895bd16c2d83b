"""GPU kernels of ``signs.py``. Bit-identical to its tensor operations."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.codecs.packing.block_coder_triton import LONGEST as LONGEST
from lightning_compress.codecs.packing.block_coder_triton import BlockCoder


def coder(block: int, values: int, body: int) -> BlockCoder:
    """Return the encoder and decoder of messages with one or two values per block and one bit per element.

    Args:
        block: elements of a block, at most ``LONGEST``; a multiple of 8.
        values: 2 for the means of both signs, 1 for the mean magnitude.
        body: first byte of the bits in the message.
    """
    return BlockCoder(_encode, _decode, block, 1, values, body, values == 2, tile=2048, warps=4)


@triton.jit
def _encode(
    numbers, inside, number, numel, state, move, message, extra,
    BLOCK: tl.constexpr, BITS: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    length = tl.minimum(numel - number * BLOCK, BLOCK).to(tl.int32)
    above = numbers >= 0
    if MEANS:
        upper = tl.sum(tl.where(above, numbers, 0.0).to(tl.float64), axis=1)
        lower = tl.sum(tl.where(above, 0.0, numbers).to(tl.float64), axis=1)
        found = tl.sum((above & inside).to(tl.int32), axis=1)
        high = (upper / tl.maximum(found, 1).to(tl.float64)).to(tl.float32)
        low = (lower / tl.maximum(length - found, 1).to(tl.float64)).to(tl.float32)
    else:
        high = (tl.sum(tl.abs(numbers).to(tl.float64), axis=1) / tl.maximum(length, 1).to(tl.float64)).to(tl.float32)
        low = -high
    return high, low, above.to(tl.int32), tl.where(above, high[:, None], low[:, None])


@triton.jit
def _decode(high, low, codes, weight, head, BITS: tl.constexpr, MEANS: tl.constexpr):
    high *= weight
    if MEANS:
        low *= weight
    else:
        low = -high
    return tl.where(codes != 0, high[:, None], low[:, None])
