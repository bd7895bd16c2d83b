"""Task A: a character LSTM on the English captions of Multi30k."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._language import CharLSTM, Text, excerpts, read_text
from benchmarks._target.averaging import MakeOptimizer

BATCH, LENGTH, HELD_OUT = 16, 64, 128


class Characters:
    """Characters of captions: a new model, a rank's batches, and the losses on two halves of the held-out text.

    Args:
        root: folder that holds multi30k.

    Attributes:
        batch: excerpts of a rank's batch.
        held_out: characters of a held-out excerpt.
    """

    batch, held_out = BATCH, HELD_OUT

    def __init__(self, root: Path) -> None:
        self._text: Text = read_text(root)

    def model(self) -> nn.Module:
        """Return a new model, which depends on torch's seed."""
        return CharLSTM(self._text.vocabulary)

    def batches(self, seed: int, rank: int) -> Iterator[Tensor]:
        """Yield a rank's batches without end; equal for all methods."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            yield excerpts(self._text.train, self.batch, LENGTH, generator)

    @torch.no_grad()
    def losses(self, model: nn.Module, rank: int, ranks: int) -> Tensor:
        """Return sums of losses and counts, float64 [2, 2], of this rank's share of both halves.

        Excerpts of 128 characters take turns between the half that chooses a learning rate and the one that is
        reported.
        """
        text = self._text.held_out
        length = self.held_out + 1
        rows = text[: len(text) // length * length].view(-1, length)
        shares = [rows[half::2][rank::ranks] for half in range(2)]
        return torch.tensor(
            [[float(model(share)) * len(share) if len(share) else 0.0, len(share)] for share in shares],
            dtype=torch.float64,
        )

    def optimizer(self, rate: float) -> MakeOptimizer:
        """Return what makes AdamW, or another ``kind`` with its rate and weight decay."""

        def make(parameters: Any, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = kind(parameters, lr=rate, weight_decay=0.01)
            return optimizer

        return make
