"""GPU kernels of ``qsgd.py``. Bit-identical to its tensor operations."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_compress.codecs.packing.block_coder_triton import LONGEST as LONGEST
from lightning_compress.codecs.packing.block_coder_triton import BlockCoder
from lightning_compress.codecs.quantize.levels_triton import LARGEST, fit, levels_of, round_levels, step_of
from lightning_compress.kernels.triton.random_bits import random_bits


def coder(bucket: int, squares: bool, bits: int, body: int) -> BlockCoder:
    """Return the encoder and decoder of messages with one norm per bucket and one code per element.

    A thread holds 32 elements, so one warp handles a bucket of up to 1024 and finds its maximum without other warps.

    Args:
        bucket: elements that share a norm, at most ``LONGEST``; a multiple of 8.
        squares: use the L2 norm instead of the largest magnitude.
        bits: bits of a code, 2 to 8.
        body: first byte of the codes in the message.
    """
    return BlockCoder(_encode, _decode, bucket, bits, 1, body, squares, tile=1024)


@triton.jit
def _encode(
    numbers, inside, number, numel, state, move, message, extra,
    BLOCK: tl.constexpr, BITS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    top: tl.constexpr = 2 ** (BITS - 1) - 1
    if SQUARES:
        wide = numbers.to(tl.float64)
        norm = tl.sqrt(tl.sum(wide * wide, axis=1))
    else:
        norm = tl.max(tl.abs(numbers), axis=1)
    norm, factor = fit(norm, top, LARGEST)
    random = random_bits(state, number * BLOCK, move, numbers.shape[1])
    level = round_levels(numbers * factor[:, None], random, 0.0)
    return norm, norm, level.to(tl.int32), level * step_of(norm, top)[:, None]


@triton.jit
def _decode(norm, other, codes, weight, head, BITS: tl.constexpr, SQUARES: tl.constexpr):
    scale = step_of(norm, 2 ** (BITS - 1) - 1) * weight
    return levels_of(codes, BITS) * scale[:, None]
