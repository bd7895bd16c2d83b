"""Small tasks that benchmarks train on: a new model, a rank's batch of a step, and the loss on held-out data."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks._language import CharLSTM, excerpts, read_text

BATCH, LENGTH = 16, 64
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


class Reading:
    """Characters of text: a new model, a rank's batch of a step, and the loss on half of the held-out text."""

    def __init__(self, root: Path) -> None:
        self._text = read_text(root)

    def model(self) -> nn.Module:
        """A new one."""
        return CharLSTM(self._text.vocabulary)

    def batch(self, generator: torch.Generator) -> Tensor:
        """Excerpts."""
        return excerpts(self._text.train, BATCH, LENGTH, generator)

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        """Mean loss on half of the held-out text, cut into excerpts of 128 characters."""
        length, text = 128, self._text.held_out
        rows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)[::2]
        return float(model(rows))


class Learning:
    """A function, by examples; likewise."""

    def __init__(self, root: Path | None = None) -> None:
        self._teacher = Teacher()

    def model(self) -> nn.Module:
        """A new one."""
        return MLP()

    def batch(self, generator: torch.Generator) -> Tensor:
        """Examples."""
        return self._teacher.draw(BATCH, generator)

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        """Squared error over the variance of what is to be learnt, on examples of its own."""
        return float(model(self._teacher.held_out))


TASKS = {"lstm": Reading, "mlp": Learning}
