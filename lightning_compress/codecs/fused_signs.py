"""A sign for each element by a kernel of an accelerator."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from lightning_compress.codecs.fused import FusedPlan
from lightning_compress.codecs.signs import Signs
from lightning_compress.kernels import Summands
from lightning_compress.layout import Layout


class FusedSigns(FusedPlan, Signs):
    """See ``Signs`` and ``kernels/triton/signs.py``; blocks of up to ``LONGEST`` elements."""

    def __init__(self, kernel: ModuleType, layout: Layout, block: int, values: int) -> None:
        super().__init__(layout, block, values)
        self._kernel, self._shape = kernel, (self._block, values, self._bits)

    def write(self, vector: Tensor, summands: Summands, message: Tensor, key: int, keep: bool) -> None:
        """See ``FusedPlan.write``."""
        self._kernel.encode(vector, summands, message, *self._shape)

    def read(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``FusedPlan.read``."""
        self._kernel.decode(messages, out, weight, accumulate, *self._shape)
