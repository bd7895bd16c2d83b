"""A small regression with as much data as one likes: a network learns what another one of its shape makes of noise."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

INPUTS, HIDDEN, OUTPUTS = 64, 128, 16


class MLP(nn.Module):
    """Two hidden layers: 26,624 weights, all matrices large enough to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        widths = (INPUTS, HIDDEN, HIDDEN, OUTPUTS)
        layers = [nn.Linear(*each) for each in pairwise(widths)]
        self.layers = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, examples: Tensor) -> Tensor:
        """Mean squared error over the targets' variance; float32 ``[batch, INPUTS + OUTPUTS]``."""
        targets = examples[:, INPUTS:]
        loss: Tensor = (self.layers(examples[:, :INPUTS]) - targets).square().mean()
        return loss / targets.var()


class Teacher:
    """Draws examples; the same function for everybody."""

    def __init__(self) -> None:
        state = torch.get_rng_state()
        torch.manual_seed(1234)
        self._network = MLP().layers
        torch.set_rng_state(state)
        self.held_out = self.draw(4096, torch.Generator().manual_seed(99))

    @torch.no_grad()
    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Float32 ``[count, INPUTS + OUTPUTS]``."""
        inputs = torch.randn(count, INPUTS, generator=generator)
        return torch.cat([inputs, self._network(inputs)], 1)
