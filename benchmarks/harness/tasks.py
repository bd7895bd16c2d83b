"""Small tasks that benchmarks train on: a new model, a rank's batches, and the losses on held-out data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks._digits import mnist
from benchmarks._language import CharTransformer
from benchmarks._target.characters import LENGTH, Characters
from benchmarks.harness.models import perceptron

BATCH = 16
INPUTS, HIDDEN, OUTPUTS = 64, 128, 16


class MLP(nn.Module):
    """Two hidden layers: 26,624 weights, all matrices large enough to be compressed."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = perceptron(*(widths or (INPUTS, HIDDEN, HIDDEN, OUTPUTS)))

    def forward(self, examples: Tensor) -> Tensor:
        """Mean squared error over the targets' variance; float32 ``[batch, INPUTS + OUTPUTS]``."""
        targets = examples[:, INPUTS:]
        loss: Tensor = (self.layers(examples[:, :INPUTS]) - targets).square().mean()
        return loss / targets.var()


class Learning:
    """A function, the same for everybody, by examples; see ``Characters``."""

    def __init__(self, root: Path | None = None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            self._network = MLP().layers
        self._held_out = self._draw(4096, torch.Generator().manual_seed(99))

    @torch.no_grad()
    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Float32 ``[count, INPUTS + OUTPUTS]``."""
        inputs = torch.randn(count, INPUTS, generator=generator)
        return torch.cat([inputs, self._network(inputs)], 1)

    def model(self) -> nn.Module:
        """A new one."""
        return MLP()

    def batches(self, seed: int, rank: int) -> Iterator[Tensor]:
        """A rank's, without end."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            yield self._draw(BATCH, generator)

    @torch.no_grad()
    def losses(self, model: nn.Module, rank: int, ranks: int) -> Tensor:
        """Sum of losses and count, ``[1, 2]``: squared errors over the variance of what is to be learnt."""
        own = self._held_out[rank::ranks]
        return torch.tensor([[float(model(own)) * len(own), len(own)]], dtype=torch.float64)


class Decoder(Characters):
    """``CharTransformer`` on the same text."""

    held_out = LENGTH

    def model(self) -> nn.Module:
        """See ``Characters``."""
        return CharTransformer(self._text.vocabulary, longest=LENGTH)


class LargeBatches(Decoder):
    """Four times as many excerpts, whose noise hides less of a code's."""

    batch = 64


class SmallDecoder(Decoder):
    """98,000 weights in hidden matrices, 112,000 in all, and 4 excerpts a batch: a fifth of the computing."""

    batch = 4

    def model(self) -> nn.Module:
        """See ``Characters``."""
        return CharTransformer(self._text.vocabulary, width=64, longest=LENGTH)


class SmallMore(SmallDecoder):
    """The same, with 8 excerpts a batch."""

    batch = 8


class Classifier(MLP):
    """For images and their labels."""

    def forward(self, examples: Tensor) -> Tensor:
        """Mean cross-entropy; float32 ``[batch, 785]``, the label last."""
        loss: Tensor = nn.functional.cross_entropy(self.layers(examples[:, :-1]), examples[:, -1].long())
        return loss


class Digits(Learning):
    """4,000 images of MNIST to learn from, and 1,000 held out, whose errors take the place of a loss."""

    def __init__(self, root: Path | None = None) -> None:
        images, labels = mnist()
        self._learnt, self._held_out = torch.cat([images, labels[:, None]], 1).split([4000, 1000])

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        rows: Tensor = self._learnt[torch.randint(4000, (count,), generator=generator)]
        return rows

    def model(self) -> nn.Module:
        """A new one, with 647,000 weights."""
        return Classifier(784, 500, 500, 10)

    @torch.no_grad()
    def losses(self, model: nn.Module, rank: int, ranks: int) -> Tensor:
        """Number of images that it gets wrong, and of all, ``[1, 2]``."""
        own = self._held_out[rank::ranks]
        wrong = (model.get_submodule("layers")(own[:, :-1]).argmax(1) != own[:, -1]).sum()
        return torch.tensor([[float(wrong), len(own)]], dtype=torch.float64)


Task = Characters | Learning
TASKS: dict[str, type[Task]] = {
    "lstm": Characters,
    "mlp": Learning,
    "mnist": Digits,
    "decoder": Decoder,
    "decoder, 64 excerpts": LargeBatches,
    "small decoder": SmallDecoder,
    "small decoder, 8 excerpts": SmallMore,
}
