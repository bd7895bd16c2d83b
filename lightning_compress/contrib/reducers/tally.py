"""Counts votes that are packed eight to a byte, with bitwise operations on whole bytes."""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """Counts, for every bit position, in how many rows the bit is 1.

    Plane p holds bit p of every count, packed like the rows. Adding a row takes one half-adder for each plane.

    Args:
        rows: largest number of rows.
        width: bytes of a row.
        device: of the rows.

    Attributes:
        planes: uint8 ``[bit length of rows, width]``: the counts.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.planes = torch.zeros(rows.bit_length(), width, dtype=torch.uint8, device=device)
        self._carry, self._above, self._equal = torch.zeros(3, width, dtype=torch.uint8, device=device)

    def count(self, rows: Tensor) -> None:
        """Replace the counts by those of these rows, uint8 ``[n, width]``."""
        self.planes.zero_()
        for number, row in enumerate(rows, start=1):
            self._carry.copy_(row)
            for plane in self.planes[: number.bit_length()]:
                torch.bitwise_and(plane, self._carry, out=self._above)
                plane.bitwise_xor_(self._carry)
                self._carry, self._above = self._above, self._carry

    def majority(self, votes: int, ties: Tensor | None, out: Tensor) -> None:
        """Write 1 for every bit of which more than half of the votes are 1, else 0.

        Args:
            votes: number of rows that were counted.
            ties: uint8, at least ``[width]``: its bits decide if exactly half of the votes are 1. None: 0 in this case.
            out: uint8 ``[width]``, overwritten.
        """
        half = votes // 2
        above, equal, bits = self._above.zero_(), self._equal.fill_(255), self._carry
        for place in reversed(range(len(self.planes))):
            plane = self.planes[place]
            if half >> place & 1:
                equal.bitwise_and_(plane)
            else:
                above.bitwise_or_(torch.bitwise_and(equal, plane, out=bits))
                equal.bitwise_and_(torch.bitwise_not(plane, out=bits))
        if votes % 2 == 0 and ties is not None:
            above.bitwise_or_(equal.bitwise_and_(ties[: len(above)]))
        out.copy_(above)
