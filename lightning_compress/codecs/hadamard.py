"""Walsh-Hadamard transforms of the columns of matrices, by additions of whole rows."""

from __future__ import annotations

import torch

from lightning_compress.codecs.buffers import scratch


class Hadamard:
    """``H x`` for every column of some matrices, ``H = [[1, 1], [1, -1]]`` to a Kronecker power; ``H H = rows * I``.

    Neighbours in memory belong to different columns, so that every step adds long contiguous runs. The order of the
    additions is fixed, as a matrix product's is not: every device finds the same bits.

    Args:
        shape: how many matrices, their rows (a power of two), and their columns.
        device: where.

    Attributes:
        matrices: float32 of this shape, to be filled by the caller; scratch.
        rows: the same memory, ``[rows, count * columns]``: the matrices stand side by side, so that runs are long.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        count, rows, columns = shape
        flat = scratch("hadamard", count * rows * columns, torch.float32, device)
        self.rows = flat.view(rows, count * columns)
        self.matrices = flat.view(rows, count, columns).transpose(0, 1)
        self._steps = []  # views are made once: making them costs as much as a step on a short run
        run = count * columns
        while run < flat.numel():
            pairs = flat.view(-1, 2, run)
            self._steps.append((pairs[:, 0], pairs[:, 1]))
            run *= 2

    def transform(self) -> None:
        """Replace the matrices by their transforms; in place, as twice as many would not fit the cache."""
        for upper, lower in self._steps:
            upper.add_(lower)
            torch.sub(upper, lower, alpha=2, out=lower)  # (a + b) - 2 b
