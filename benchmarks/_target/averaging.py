"""What one rank does with a batch, whatever method averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""Takes parameters; the task gives the learning rate."""


class Averaging:
    """A model, its optimizer, and what runs after each step.

    Args:
        model: returns the loss of a batch; wrapped if the method wraps it.
        optimizer: of its parameters.
        every: batches after which the method starts over: local steps of a round, or batches of an optimizer step.
        after: is called after each step.
        close: is called at the end.
        handle: of what was attached, if anything was.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        after: Callable[[], object] = lambda: None,
        close: Callable[[], object] = lambda: None,
        handle: Any = None,
    ) -> None:
        self.model, self.optimizer, self.every = model, optimizer, every
        self.after, self.close, self.handle = after, close, handle

    def batch(self, inputs: Tensor) -> None:
        """Train on one batch of this rank's."""
        self.optimizer.zero_grad()
        self.model(inputs).backward()
        self.optimizer.step()
        self.after()
