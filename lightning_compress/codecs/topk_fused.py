"""Messages of top-k that are arrays, by the kernels of an accelerator."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_compress.codecs.buffers import scratch
from lightning_compress.codecs.choice import Choice
from lightning_compress.codecs.fused import FusedPlan
from lightning_compress.codecs.selection import rank_of, stride_of
from lightning_compress.codecs.topk_floats import Floats
from lightning_compress.kernels import Summands
from lightning_compress.layout import Layout


class FusedFloats(FusedPlan, Floats):
    """See ``Floats``, and ``kernels/triton/topk.py``."""

    def __init__(
        self, kernel: ModuleType, layout: Layout, device: torch.device, choice: Choice, dtype: torch.dtype
    ) -> None:
        super().__init__(layout, choice, dtype)
        self._spare = choice.most if self._slots > choice.most else -1
        parts = [_part(kernel, part, k, choice.sampled) for part, k in choice.parts]
        listed = scratch("top-k candidates", sum(part.room for part in parts), torch.int64, device)
        self._add, self._topk = kernel.lists.add, kernel.topk.TopK(parts, listed, device) if parts else None

    def write(self, vector: Tensor, summands: Summands, message: Tensor, key: int, keep: bool) -> None:
        """See ``FusedPlan.write``."""
        if self._topk:
            self._topk.select(vector, summands, key, *self._sections(message), self._spare)

    def read(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``FusedPlan.read``."""
        if not accumulate:
            out.zero_()
        for indices, values in zip(*self._sections(messages), strict=True) if self._topk else ():
            self._add(indices, values, out, weight)


def _part(kernel: ModuleType, part: range, k: int, sampled: bool) -> Any:
    """What the kernel takes; the sample is the one that a CPU looks at."""
    numel = len(part)
    stride = stride_of(numel, k) if sampled and k < numel else 0
    few, more = (rank_of(numel // stride + each, numel, k) if stride else 0 for each in (0, 1))
    return kernel.topk.Part(part.start, numel, k, stride if few or more else 0, few, more)
