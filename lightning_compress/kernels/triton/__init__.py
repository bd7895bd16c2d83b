"""Kernels for accelerators: one pass over the numbers, which adds the residual, encodes, and writes what stays.

What they write equals, bit for bit, what the kernels for the CPU and the codecs' tensor operations write: products and
sums are rounded one by one (``enable_fp_fusion=False``), and sums over a block are in float64. They never wait for
the device and keep no state, so that a CUDA graph may hold them.
"""

from __future__ import annotations

from lightning_compress.kernels.triton import (
    halves,
    lists,
    momentum,
    natural,
    qsgd,
    range_float,
    rotated,
    segments,
    signs,
    spectrum,
    ternary,
    topk,
    vectors,
)

__all__ = [
    "halves",
    "lists",
    "momentum",
    "natural",
    "qsgd",
    "range_float",
    "rotated",
    "segments",
    "signs",
    "spectrum",
    "ternary",
    "topk",
    "vectors",
]
