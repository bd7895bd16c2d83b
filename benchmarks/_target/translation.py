"""Task B: a Transformer of 16 million parameters that translates the captions of Multi30k to German."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks._target.averaging import MakeOptimizer
from recipes.loading import BucketSampler
from recipes.nmt.data import Pairs, padded
from recipes.nmt.model import Transformer
from recipes.nmt.texts import Multi30k
from recipes.nmt.tokenizer import PAD

TOKENS = 256
"""Most that a batch of a rank holds: sentences times the pieces of the longer side."""
RANKS = 4
HELD_OUT, TOGETHER = 512, 32
"""Sentences that are evaluated, and how many at a time."""
SMOOTHING = 0.1


class Translator(nn.Module):
    """The recipe's model, with its loss.

    Args:
        vocabulary: pieces of both languages.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.inner = Transformer(vocabulary, dropout=0.0)

    def forward(self, pair: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of the target's pieces; smoothed in training.

        Args:
            pair: sources and targets, int64 [2, sentences, pieces], filled up with ``PAD``.
        """
        source, target = (side[:, : int((side != PAD).any(0).sum())] for side in pair)
        expected = target[:, 1:]
        real = expected != PAD
        logits = self.inner.logits(self.inner(source, target[:, :-1])[real])
        return cross_entropy(logits, expected[real], label_smoothing=SMOOTHING if self.training else 0.0)


class Translation:
    """Pairs of sentences: a new model, a rank's batches, and the losses on two halves of the validation set.

    Args:
        root: folder that holds multi30k.
    """

    def __init__(self, root: Path) -> None:
        data = Multi30k(root=str(root))
        self._vocabulary = len(data.tokenizer)
        self._train = Pairs(data.parts["train"], data.tokenizer)
        self._held_out = Pairs(data.parts["val"][:HELD_OUT], data.tokenizer)

    def model(self) -> nn.Module:
        """Return a new model, which depends on torch's seed."""
        return Translator(self._vocabulary)

    def batches(self, seed: int, rank: int) -> Iterator[Tensor]:
        """Yield a rank's batches without end; equal for all methods."""
        sampler = BucketSampler(self._train.lengths, budget=TOKENS, seed=seed, num_replicas=RANKS, rank=rank)
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            for rows in sampler:
                yield _pair(self._train, rows)
            epoch += 1

    @torch.no_grad()
    def losses(self, model: nn.Module, rank: int, ranks: int) -> Tensor:
        """Return sums of losses and counts of pieces, float64 [2, 2], of this rank's share of both halves.

        Sentences take turns, by length, between the half that chooses a learning rate and the one that is reported.
        """
        model.eval()
        order = sorted(range(len(self._held_out)), key=self._held_out.lengths.__getitem__)
        sums = torch.zeros(2, 2, dtype=torch.float64)
        for half in range(2):
            mine = order[half::2][rank::ranks]
            for start in range(0, len(mine), TOGETHER):
                pair = _pair(self._held_out, mine[start : start + TOGETHER])
                pieces = int((pair[1][:, 1:] != PAD).sum())
                sums[half] += torch.tensor([float(model(pair)) * pieces, pieces])
        return sums

    def optimizer(self, rate: float) -> MakeOptimizer:
        """Return what makes Adam with its rate."""

        def make(parameters: Any, kind: Any = torch.optim.Adam) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = kind(parameters, lr=rate)
            return optimizer

        return make


def _pair(pairs: Pairs, rows: list[int]) -> Tensor:
    both = padded([side[row] for side in (pairs.source, pairs.target) for row in rows])
    return both.view(2, len(rows), -1)
