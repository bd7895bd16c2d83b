"""Scaled signs: a sign per element and one magnitude per block."""

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
        return plan_signs(layout, device, self.block, values=1)
