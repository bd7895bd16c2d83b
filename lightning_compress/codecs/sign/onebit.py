"""1-bit SGD: one sign per element and two reconstruction values per block."""

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
    """Send ``v >= 0`` as one bit, and two means per block: ``1 + 64 / block`` bits per element.

    A block is a run of consecutive elements. ``hi`` is the mean of its elements ``>= 0``, ``lo`` the mean of the others
    (0 if there are none). The receiver replaces each element by ``hi`` or ``lo``. The difference stays in the vector:
    it sums to zero in each block, and has 1 - 2/pi = 0.363 of the squared norm for normal data. The method is biased
    and needs error feedback. In the paper, a block is a column of a weight matrix. Blocks of fixed length also work for
    convolutions and narrow layers, whose columns are short.

    A message is every block's ``hi``, then every block's ``lo``, as float32, zeros up to a multiple of 16 bytes, then
    the bits, the first element lowest.

    Args:
        block: elements that share two means: a multiple of 8, at least 64, without upper limit. Small blocks have the
            smallest error (64: 2 bits per element). A vector that is shorter is one block. Shards of an
            exchange are cut at its multiples.
        scope: "block", or "column" as in the paper: the weights of one output unit, one index of the first dimension of
            ``[out, in, ...]``, share two means. That takes ``1 + 64 / (numel / out)`` bits per element, so short
            columns (narrow layers, the first convolution) would not be compressed without ``min_column``.
        min_column: with scope "column", units share means until a column has at least this number of elements: 1 (65
            bits for a column of 1 element) or more. A longer column is not split. A column that a shard cuts becomes
            two columns.

    Raises:
        ValueError: a setting is out of range.

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
        """See ``Codec.plan``; ``summands`` is ignored, because messages cannot be summed."""
        if self.scope == "column":
            runs = [run for segment in layout.segments for run in columns(segment, self.min_column)]
            return SignPlan(layout, device, runs, values=2)
        return plan_signs(layout, device, self.block, values=2)


def columns(segment: Segment, min_column: int) -> list[tuple[int, int]]:
    """Return a segment's columns as runs ``(number of columns, elements of each)``, which fill the segment in order.

    A column is one row of the parameter as ``[out, rest]``, or as many rows as have ``min_column`` elements together.
    The part of a column that was cut is a column too, and so are the remaining rows at the end.
    """
    units = segment.shape[0] if segment.shape else 1
    width = max(1, math.prod(segment.shape) // max(1, units))
    length = -(-min_column // width) * width
    head = min(-segment.start % length, segment.numel)
    whole, tail = divmod(segment.numel - head, length)
    return [run for run in ((1, head), (whole, length), (1, tail)) if all(run)]
