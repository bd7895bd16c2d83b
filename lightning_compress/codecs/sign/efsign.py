"""Scaled signs: one sign per element and one magnitude per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_compress.codecs.codec import Codec, Plan
from lightning_compress.codecs.sign.signs import plan_signs
from lightning_compress.core.layout import Layout


@dataclass(frozen=True)
class EFSign(Codec):
    """Send ``mean|v| * sign(v)`` block by block: ``1 + 32 / block`` bits per element.

    ``sign`` is +1 for ``v >= 0``, including 0.0 and -0.0, and -1 otherwise; one bit has no third value. The rest,
    ``v - mean|v| * sign(v)``, stays in the vector. Its squared norm is the share ``1 - mean|v|^2 / mean(v^2)`` of the
    block's (1 - 2/pi = 0.363 for normal data). So the method is contractive and biased, and needs error feedback. In
    the paper, a block is a layer. Blocks of fixed length have a smaller error, and do not depend on how layers are
    split into buckets.

    A message is every block's mean as float32, zeros up to a multiple of 16 bytes, then the bits, the first element
    lowest. No state.

    Args:
        block: elements that share a magnitude: a multiple of 8, at least 64, without upper limit. Small blocks have the
            smallest error (64: 1.5 bits per element). A vector that is shorter is one block.

    Raises:
        ValueError: block is out of range.

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
        """See ``Codec.plan``; ``summands`` is ignored, because messages cannot be summed."""
        return plan_signs(layout, device, self.block, values=1)
