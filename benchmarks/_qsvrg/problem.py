"""Softmax regression on digits, and its optimum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._digits import digits

NEWTON_STEPS = 20


@dataclass(frozen=True)
class Problem:
    """Softmax regression: mean cross-entropy plus ``penalty / 2`` times the squared weights.

    Args:
        rows: float64 ``[rows, features]``.
        labels: int64 ``[rows]``.
        penalty: of the weights; the problem is that strongly convex.
    """

    rows: Tensor
    labels: Tensor
    penalty: float

    @classmethod
    def of_digits(cls, ranks: int, penalty: float) -> Problem:
        """Return the problem on all digits that ``ranks`` ranks can share equally, in a fixed random order."""
        pixels, labels = digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: len(labels) // ranks * ranks]
        rows = torch.cat([pixels, torch.ones(len(labels), 1)], 1).double()
        return cls(rows[order], labels[order], penalty)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weights."""
        return self.rows.shape[1], int(self.labels.max()) + 1

    @cached_property
    def smoothness(self) -> float:
        """A bound of the Hessian's largest eigenvalue: softmax contributes at most half of the rows' own."""
        return float(torch.linalg.eigvalsh(self.rows.T @ self.rows / len(self.rows))[-1]) / 2 + self.penalty

    def value(self, weights: Tensor) -> Tensor:
        """Float64 scalar."""
        return F.cross_entropy(self.rows @ weights, self.labels) + self.penalty / 2 * weights.square().sum()

    def gradient(self, weights: Tensor, places: Tensor) -> Tensor:
        """Of the mean over these rows and the penalty."""
        rows = self.rows[places]
        excess = torch.softmax(rows @ weights, 1)
        excess[torch.arange(len(places)), self.labels[places]] -= 1
        return rows.T @ excess / len(places) + self.penalty * weights

    def hessian(self, weights: Tensor) -> Tensor:
        """Of all rows, ``[numel, numel]``."""
        shares = torch.softmax(self.rows @ weights, 1)
        curved = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
        of_rows = torch.einsum("ra,rb,rkl->akbl", self.rows, self.rows, curved) / len(self.rows)
        return of_rows.reshape(weights.numel(), -1) + self.penalty * torch.eye(weights.numel(), dtype=torch.float64)

    @cached_property
    def optimum(self) -> float:
        """The least value."""
        weights, every = torch.zeros(self.shape, dtype=torch.float64), torch.arange(len(self.rows))
        for _ in range(NEWTON_STEPS):
            step = torch.linalg.solve(self.hessian(weights), self.gradient(weights, every).flatten())
            weights -= step.view(self.shape)
            if float(step.norm()) < 1e-12:
                return float(self.value(weights))
        raise RuntimeError(f"Newton's method did not find the optimum in {NEWTON_STEPS} steps")
