"""1-bit SGD: a sign per element and two reconstruction values per block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_compress.codecs.base import Codec, Plan
from lightning_compress.codecs.sign.columns import ColumnPlan
from lightning_compress.codecs.sign.signs import FusedSigns, SignPiece, SignPlan
from lightning_compress.core.layout import Layout

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
            return ColumnPlan(layout, device, self.min_column)
        if FusedSigns.fits(self.block, device):
            return FusedSigns(layout, device, self.block, values=2)
        return _OneBitPlan(layout, device, self.block, values=2)


class _OneBitPlan(SignPlan):
    def kernel(self, module: ModuleType) -> Callable[..., None]:
        return module.split_signs  # type: ignore[no-any-return]

    def levels(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values[:, 0], values[:, 1]

    def subtract(self, piece: SignPiece, rows: Tensor, values: Tensor) -> None:
        signs = self._average(piece, rows, values)
        high, low = values.unsqueeze(2)
        rows.addcmul_(signs, high, value=-1)  # each element is rounded once: the other product is 0
        rows.addcmul_(signs.sub_(1), low)

    def add(self, rows: Tensor, signs: Tensor, values: Tensor) -> None:
        high, low = values
        rows.addcmul_(signs, high)
        rows.addcmul_(signs.sub_(1), low, value=-1)

    def _average(self, piece: SignPiece, rows: Tensor, means: Tensor) -> Tensor:
        """Mean of either side of each block, summed in float64 so that every device writes the same bytes.

        Returns:
            1.0 where an element is on the upper side and 0.0 elsewhere; in scratch.
        """
        high, low = piece.sums
        torch.sum(piece.wide.copy_(rows), dim=1, out=low)
        torch.sum(piece.wide.clamp_(min=0), dim=1, out=high)
        low.sub_(high)
        if rows.device.type != "cpu" or torch.any(low.neg() < high * 1e-3):  # few digits are left of the difference
            torch.sum(piece.wide.copy_(rows).clamp_(max=0), dim=1, out=low)
        signs = torch.ge(rows, 0, out=piece.floats)  # floats, as torch compares into these by vectors
        upper, lower = piece.counts
        exact = torch.float32 if piece.shape[1] <= 1 << 24 else torch.float64  # for a sum of so many ones
        upper.copy_(signs.sum(dim=1, dtype=exact))
        torch.sub(piece.shape[1], upper, out=lower)
        means.copy_(piece.sums.div_(piece.counts.clamp_(min=1)))
        return signs
