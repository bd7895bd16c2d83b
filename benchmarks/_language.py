"""A small language model on real text: characters of the English captions of Multi30k (Elliott et al. 2016)."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

FOLDER = "multi30k"


@dataclass(frozen=True)
class Text:
    """Characters as numbers below ``vocabulary``, int64: ``train``, 1.8 million, and ``held_out``, 63 thousand."""

    train: Tensor
    held_out: Tensor
    vocabulary: int


def read_text(root: Path) -> Text:
    """Read ``multi30k/{train,val}.en.gz`` below ``root``.

    Raises:
        FileNotFoundError: they are not there.
    """
    texts = [gzip.decompress((root / FOLDER / f"{part}.en.gz").read_bytes()).decode() for part in ("train", "val")]
    numbers = {character: number for number, character in enumerate(sorted(set("".join(texts))))}
    train, held_out = (torch.tensor([numbers[each] for each in text]) for text in texts)
    return Text(train, held_out, len(numbers))


class CharLSTM(nn.Module):
    """Embedding, one LSTM layer, linear: 426,000 parameters, and all matrices large enough to be compressed."""

    def __init__(self, vocabulary: int, embedding: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of each character but the first given those before it.

        Args:
            characters: int64 ``[batch, length + 1]``.
        """
        states, _ = self.lstm(self.embedding(characters[:, :-1]))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), characters[:, 1:].flatten())


class CharTransformer(nn.Module):
    """A decoder of two layers with layer norm before each part: 430,000 parameters."""

    def __init__(self, vocabulary: int, width: int = 128, heads: int = 4, layers: int = 2, longest: int = 64) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """See ``CharLSTM``; of at most ``longest`` characters."""
        given = characters[:, :-1]
        length = given.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.layers(self.embedding(given) + self.places.weight[:length], mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), characters[:, 1:].flatten())


def excerpts(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """``[batch, length + 1]`` consecutive characters from random places."""
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
    return text[starts + torch.arange(length + 1)]
