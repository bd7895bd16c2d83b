"""1-bit SGD: a sign per element and two reconstruction values per block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from lightning_compress.codecs.codec import Codec, Plan
from lightning_compress.codecs.sign.signs import SignPlan, plan_signs
from lightning_compress.core.layout import Layout, Segment

Scope = Literal["block", "column"]


@dataclass(frozen=True)
class OneBit(Codec):
    """Send ``v >= 0`` as one bit, and for each block the mean of either side: ``1 + 64 / block`` bits per element.

    In each block of consecutive elements ``hi`` is the mean of those with ``v >= 0`` and ``lo`` that of the others
    (0 where there is none). The receiver puts these in place; ``v - hi`` or ``v - lo`` stays in the vector, so what
    stays sums to zero in each block and is 1 - 2/pi = 0.363 of normal data's squared norm. The method is
    biased and needs error feedback. The paper's blocks are the columns of a weight matrix; fixed ones do not
    degenerate for convolutions and narrow layers. A message is every block's ``hi``, then every
    block's ``lo`` as float32, zeros up to a multiple of 16 bytes, then the bits, the first one lowest.

    Args:
        block: elements that share two means; a multiple of 8, at least 64 (2 bits per element, closest), and as large
            as one likes (a vector that is shorter is one block: 1 bit per element, coarsest). Shards of an exchange
            are cut at its multiples.
        scope: "block", or "column" for the paper's: the weights that feed one unit share two means, which for
            ``[out, in, ...]`` are those of one index of the first dimension: ``1 + 64 / (numel / out)`` bits per
            element, so that short columns (narrow layers, the first convolution) would not be compressed at all.
        min_column: with scope "column", as many units share the means as reach this number of elements; at least 1
            (65 bits for a column of 1 element), and as large as one likes; a column that is longer is one. A column
            that a shard cuts is two.

    Raises:
        ValueError: block or min_column is no such number, or there is no such scope.

    Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs", Interspeech 2014.
    """

    name: ClassVar[str] = "onebit"
    contractive: ClassVar[bool] = True
    block: int = 1024
    scope: Scope = "block"
    min_column: int = 64

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise ValueError(f"OneBit(scope={self.scope!r}): scope must be one of {', '.join(get_args(Scope))}")
        if isinstance(self.min_column, bool) or not isinstance(self.min_column, int) or self.min_column < 1:
            raise ValueError(
                f"OneBit(min_column={self.min_column!r}): min_column must be an integer, 1 or more; try 64"
            )
        if not isinstance(self.block, int) or self.block < 64 or self.block % 8:
            raise ValueError(f"OneBit(block={self.block!r}): block must be a multiple of 8, at least 64; try 1024")

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        if self.scope == "column":
            runs = [run for segment in layout.segments for run in columns(segment, self.min_column)]
            return SignPlan(layout, device, runs, values=2)
        return plan_signs(layout, device, self.block, values=2)


def columns(segment: Segment, min_column: int) -> list[tuple[int, int]]:
    """Where a segment's columns are: runs of ``(how many, elements of each)`` that fill it, in order.

    A column is a row of the parameter as ``[out, rest]``, or as many rows as reach ``min_column`` elements. What a
    segment has of a column that was cut is a column too, and so are the rows that are left over at the end.
    """
    units = segment.shape[0] if segment.shape else 1
    width = max(1, math.prod(segment.shape) // max(1, units))
    length = -(-min_column // width) * width
    head = min(-segment.start % length, segment.numel)
    whole, tail = divmod(segment.numel - head, length)
    return [run for run in ((1, head), (whole, length), (1, tail)) if run[0] and run[1]]
