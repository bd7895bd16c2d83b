"""Scaled signs: a sign per element and one magnitude per block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress.codecs.base import Codec, Plan
from lightning_compress.codecs.sign.signs import FusedSigns, SignPiece, SignPlan
from lightning_compress.core.layout import Layout


@dataclass(frozen=True)
class EFSign(Codec):
    """Send ``mean|v| * sign(v)`` block by block: ``1 + 32 / block`` bits per element.

    ``sign`` is +1 for ``v >= 0``, zeros of either sign included, and -1 for the others, as the wire has no third value.
    What stays in the vector is ``v - mean|v| * sign(v)``, a share ``1 - mean|v|^2 / mean(v^2)`` of the block's squared
    norm (1 - 2/pi = 0.363 of normal data's): the method contracts, is biased and needs error feedback. The paper's
    blocks are layers; fixed ones are closer and do not depend on how layers are cut into buckets. A message is every
    block's mean as float32, zeros up to a multiple of 16 bytes, then the bits, the first one lowest. No state.

    Args:
        block: elements that share a magnitude; a multiple of 8, at least 64 (1.5 bits per element, closest), and as
            large as one likes (a vector that is shorter is one block: 1 bit per element, coarsest).

    Raises:
        ValueError: block is no such number.

    Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
    2019, arXiv 1901.09847.
    """

    name: ClassVar[str] = "efsign"
    contractive: ClassVar[bool] = True
    block: int = 1024

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 64 or self.block % 8:
            raise ValueError(f"EFSign(block={self.block!r}): block must be a multiple of 8, at least 64; try 1024")

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        if FusedSigns.fits(self.block, device):
            return FusedSigns(layout, device, self.block, values=1)
        return _EFSignPlan(layout, device, self.block, values=1)


class _EFSignPlan(SignPlan):
    def kernel(self, module: ModuleType) -> Callable[..., None]:
        return module.scale_signs  # type: ignore[no-any-return]

    def levels(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values[:, 0], -values[:, 0]

    def subtract(self, piece: SignPiece, rows: Tensor, values: Tensor) -> None:
        total = torch.sum(piece.wide.copy_(torch.abs(rows, out=piece.floats)), dim=1, out=piece.sums[0])
        values[0] = total.div_(piece.shape[1])  # summed in float64, so that every device writes the same bytes
        signs = torch.ge(rows, 0, out=piece.floats).sub_(0.5)
        rows.addcmul_(signs, values[0].unsqueeze(1), value=-2)

    def add(self, rows: Tensor, signs: Tensor, values: Tensor) -> None:
        rows.addcmul_(signs.sub_(0.5), values[0], value=2)
