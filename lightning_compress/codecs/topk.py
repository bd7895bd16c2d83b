"""Top-k sparsification: the elements of largest magnitude, with their places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_compress.codecs.base import Codec, Plan
from lightning_compress.codecs.buffers import check
from lightning_compress.codecs.selection import CpuSelector, SortSelector
from lightning_compress.layout import Layout

Scope = Literal["parameter", "group"]
Selection = Literal["exact", "sampled"]


@dataclass(frozen=True)
class TopK(Codec):
    """Send the ``k = max(1, ceil(density * numel))`` elements of largest magnitude; the others stay in the vector.

    A message is ``K`` int32 places in the vector, ascending within a parameter, then ``K`` float32 values, for the sum
    ``K`` of all ``k``: ``64 * density`` bits per element. Values are exact, and what is sent is 0 in the vector. The
    method is biased and needs error feedback.

    Args:
        density: share that is sent, in (0, 1]: 1 sends everything and changes nothing; near 0 sends one element.
        scope: "parameter" takes the share of each parameter (or of the part of it that is in the vector), which is
            safe where gradients differ in scale; "group" takes it of the whole vector.
        selection: "exact" sends the k largest, and the first ones among equals; "sampled" sends what reaches the
            k-th magnitude as estimated on a strided sample, at most k (the largest); that is a few per cent fewer
            on average, and the slots left over hold index 0 and value 0.

    Raises:
        ValueError: a setting is none of these, or (from ``plan``) the vector has 2^31 elements or more.

    Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017 (thresholds from a sample; local
    and global scope). Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", ICLR 2018 (a second selection among
    what passed the threshold).
    """

    contractive: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    density: float = 0.01
    scope: Scope = "parameter"
    selection: Selection = "exact"

    def __post_init__(self) -> None:
        if not isinstance(self.density, (int, float)) or not 0 < self.density <= 1:
            raise ValueError(f"TopK(density={self.density!r}): density must be in (0, 1]; 0.01 sends 1 %")
        for field, allowed in (("scope", get_args(Scope)), ("selection", get_args(Selection))):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"TopK({field}={value!r}): {field} must be one of {', '.join(map(repr, allowed))}")

    @property
    def safe_with_adam(self) -> bool:
        """Only where most of the gradient is sent at once."""
        return self.density > 0.1

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        """Make ready for vectors of this layout; messages are not summed, so ``summands`` has no effect."""
        return _TopKPlan(layout, device, self)


class _TopKPlan(Plan):
    def __init__(self, layout: Layout, device: torch.device, codec: TopK) -> None:
        super().__init__(layout)
        if layout.numel >= 2**31:
            raise ValueError(
                f"TopK: the vector has {layout.numel} elements, but int32 indices end at 2^31 - 1; "
                "use smaller buckets (bucket_cap_mb)"
            )
        whole = [range(layout.numel)]
        parts = whole if codec.scope == "group" else [range(s.offset, s.end) for s in layout.segments]
        self._parts = [(part, max(1, math.ceil(codec.density * len(part)))) for part in parts if part]
        self._capacity = sum(k for _, k in self._parts)
        self.message_size = 8 * self._capacity
        self._selector = (CpuSelector if device.type == "cpu" else SortSelector)(codec.selection == "exact")

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        check(vector, message, self.layout.numel, self.message_size)
        indices, values = self._sections(message)
        filled = 0
        for part, k in self._parts:
            slots = slice(filled, filled + k)
            self._selector.select(vector, part, key, indices[slots], values[slots])
            filled += k
        vector.index_add_(0, indices, values, alpha=-1)  # exactly 0.0, and harmless where a slot is empty

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        check(out, messages, self.layout.numel, self.message_size)
        sections = [self._sections(message) for message in messages]
        indices = [self._inside(indices) for indices, _ in sections]
        if not accumulate:
            out.zero_()
        for index, (_, values) in zip(indices, sections, strict=True):
            out.index_add_(0, index, values, alpha=weight)

    def _sections(self, message: Tensor) -> tuple[Tensor, Tensor]:
        half = 4 * self._capacity
        return message[:half].view(torch.int32), message[half:].view(torch.float32)

    def _inside(self, indices: Tensor) -> Tensor:
        """Refuse places outside the vector; a device is not waited for, so there they are moved inside."""
        last = self.layout.numel - 1
        if indices.device.type != "cpu":
            return indices.clamp(0, last)
        if indices.numel() and (indices.min() < 0 or indices.max() > last):
            raise ValueError(f"TopK: the message has indices outside [0, {last}]; it is damaged, or of another layout")
        return indices
