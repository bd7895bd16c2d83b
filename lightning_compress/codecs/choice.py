"""Which elements a sparse method sends: the largest of each parameter, or of all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_compress.codecs.selection import CpuSelector, SortSelector
from lightning_compress.layout import Layout


class Choice:
    """Which elements are sent.

    Args:
        density: share that is sent, in (0, 1].
        local: of each parameter, instead of the whole vector.
        sampled: see ``Selector``.
        layout: what the vector is made of.
        device: where it is.

    Attributes:
        most: how many, at most.
        parts: what the elements are chosen from, and how many from each.
        ends: where these end.
        sampled: see above.
    """

    def __init__(self, density: float, local: bool, sampled: bool, layout: Layout, device: torch.device) -> None:
        if layout.numel >= 2**31:
            raise ValueError(
                f"TopK: the vector has {layout.numel} elements, but int32 indices end at 2^31 - 1; "
                "give parameters this large to another compressor by rules, such as 'rotated', or exclude them"
            )
        whole = [range(layout.numel)]
        parts = [range(s.offset, s.end) for s in layout.segments] if local else whole
        self.parts = [(part, max(1, math.ceil(density * len(part)))) for part in parts if part]
        self.most = sum(k for _, k in self.parts)
        self.ends = [part.stop for part, _ in self.parts]
        self._selector = (CpuSelector if device.type == "cpu" else SortSelector)(sampled)
        self.sampled = sampled

    def make(self, vector: Tensor, key: int, indices: Tensor, values: Tensor) -> None:
        """Fill ``most`` slots."""
        filled = 0
        for part, k in self.parts:
            slots = slice(filled, filled + k)
            self._selector.select(vector, part, key, indices[slots], values[slots])
            filled += k
