"""A training loop whose learning rate falls linearly to 0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def descend(
    loss_of: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """Train, and return the loss of each step.

    Args:
        loss_of: computes that of the next batch.
        optimizer: steps.
        steps: how many.
        before: is called when backward is over.
        after: is called when the optimizer stepped.
    """
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        before()
        optimizer.step()
        after()
        falling.step()
        losses.append(loss.detach())
    return losses
