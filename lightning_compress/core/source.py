"""What is encoded: float32 numbers, read once, which need not lie in one vector yet."""

from __future__ import annotations

import torch
from torch import Tensor


class Source:
    """The numbers of a vector, or the sum of a vector and an addend.

    Args:
        values: float32 ``[numel]``, finite.
        addend: float32 ``[numel]``, finite; or None.
        spare: float32 ``[numel]``, memory that encoding may overwrite if nothing is kept; None: that of ``values``.
    """

    def __init__(self, values: Tensor, addend: Tensor | None = None, spare: Tensor | None = None) -> None:
        self.values, self.addend, self.spare = values, addend, values if spare is None else spare

    def part(self, span: slice) -> Source:
        """Return the numbers of a slice."""
        return Source(self.values[span], None if self.addend is None else self.addend[span], self.spare[span])

    def into(self, out: Tensor | None) -> Tensor:
        """Write the numbers to one tensor and return it.

        Args:
            out: float32 ``[numel]``; it may be the memory of ``values`` or ``addend``. None: spare memory.
        """
        target = self.spare if out is None else out
        if self.addend is not None:
            return torch.add(self.values, self.addend, out=target)
        return target if target.data_ptr() == self.values.data_ptr() else target.copy_(self.values)

    def terms(self, span: slice) -> list[Tensor]:
        """Return the tensors whose sum a slice is."""
        return [self.values[span], *([] if self.addend is None else [self.addend[span]])]

    def pointers(self, rest: Tensor | None) -> tuple[tuple[Tensor, Tensor, Tensor], bool, bool]:
        """Return what kernels for accelerators read and write.

        Args:
            rest: see ``Plan.encode_from``.

        Returns:
            The tensors ``first`` and ``second`` of ``read_sum``, and ``rest`` or spare memory; whether both are
            added; whether ``rest`` is written.
        """
        second = self.values if self.addend is None else self.addend
        written = self.spare if rest is None else rest
        return (self.values, second, written), self.addend is not None, rest is not None
