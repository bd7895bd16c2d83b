"""Walsh-Hadamard transforms of the columns of a matrix, by additions of whole rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.codecs.bits import scratch


class Hadamard:
    """``H x`` for every column of a matrix, ``H = [[1, 1], [1, -1]]`` to a Kronecker power; ``H H = rows * I``.

    Neighbours in memory belong to different columns, so that every step adds long contiguous runs.

    Args:
        rows: a power of two.
        columns: how many are transformed at once.
        device: where.

    Attributes:
        input: float32 ``[rows, columns]``, to be filled by the caller; scratch.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        numel = rows * columns
        here, there = (scratch(f"hadamard {name}", numel, torch.float32, device) for name in ("even", "odd"))
        self.input = here.view(rows, columns)
        self._steps = []  # views are made once: making them costs as much as a step on a short run
        run = columns
        while run < numel:
            source, target = here.view(-1, 2, run), there.view(-1, 2, run)
            self._steps.append((source[:, 0], source[:, 1], target[:, 0], target[:, 1]))
            here, there = there, here
            run *= 2
        self._output = here.view(rows, columns)

    def transform(self) -> Tensor:
        """The transform of ``input``, in scratch; ``input`` is overwritten."""
        for upper, lower, total, difference in self._steps:
            torch.add(upper, lower, out=total)
            torch.sub(upper, lower, out=difference)
        return self._output
