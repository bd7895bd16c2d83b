"""Walsh-Hadamard transforms of the columns of a matrix, by additions of whole rows."""

from __future__ import annotations

import torch

from lightning_compress.codecs.buffers import scratch


class Hadamard:
    """``H x`` for every column of a matrix, ``H = [[1, 1], [1, -1]]`` to a Kronecker power; ``H H = rows * I``.

    Neighbours in memory belong to different columns, so that every step adds long contiguous runs. The order of the
    additions is fixed, as a matrix product's is not: every device finds the same bits.

    Args:
        rows: a power of two.
        columns: how many are transformed at once.
        device: where.

    Attributes:
        matrix: float32 ``[rows, columns]``, to be filled by the caller; scratch.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        numel = rows * columns
        flat = scratch("hadamard", numel, torch.float32, device)
        self.matrix = flat.view(rows, columns)
        self._steps = []  # views are made once: making them costs as much as a step on a short run
        run = columns
        while run < numel:
            pairs = flat.view(-1, 2, run)
            self._steps.append((pairs[:, 0], pairs[:, 1]))
            run *= 2

    def transform(self) -> None:
        """Replace the matrix by its transform; in place, as two of them would not fit the cache."""
        for upper, lower in self._steps:
            upper.add_(lower)
            torch.sub(upper, lower, alpha=2, out=lower)  # (a + b) - 2 b
