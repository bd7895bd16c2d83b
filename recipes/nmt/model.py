"""A Transformer, and an LSTM with attention."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .tokenizer import PAD

__all__ = ["LSTM", "Transformer"]


class Attention(nn.Module):
    """Scaled dot-product attention in several heads.

    Args:
        width: size of the vectors, a multiple of ``heads``.
        heads: attentions beside each other.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        # Softmax cancels a bias of keys: its gradient is rounding noise, which Adam would blow up
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, S, width] -> keys and values, [N, heads, S, width / heads] each."""
        keys, values = (self._split(each) for each in self.key_value(x).chunk(2, -1))
        return keys, values

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """Queries from [N, T, width]; ``mask`` bool [N, 1, 1, S] or None, True where a key may be seen."""
        query = self._split(self.query(x))
        seen = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return split


class Layer(nn.Module):
    """Attention to itself, in the decoder attention to the source, and a feed-forward network; each added to its input.

    Args:
        width: size of the vectors.
        heads: of the attentions.
        hidden: width of the feed-forward network.
        dropout: share of what each part gives that is dropped.
        decoder: attend to the source as well.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, *, decoder: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        if decoder:
            self.norm2, self.cross = nn.LayerNorm(width), Attention(width, heads)
        self.norm3 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, memory: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[N, T, width] -> the same; ``mask`` is the source's, ``memory`` its keys and values for a decoder."""
        y = self.norm1(x)
        keys, values = self.attention.read(y)
        causal = memory is not None  # padding comes last: what it is, no real position sees
        x = x + self.dropout(self.attention(y, keys, values, None if causal else mask, causal))
        return self._rest(x, mask, memory)

    def step(
        self, x: Tensor, mask: Tensor | None, memory: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One position [N, 1, width] after ``past`` keys and values; and these with its own."""
        y = self.norm1(x)
        keys, values = (torch.cat(both, 2) for both in zip(past, self.attention.read(y), strict=True))
        return self._rest(x + self.attention(y, keys, values, None), mask, memory), (keys, values)

    def _rest(self, x: Tensor, mask: Tensor | None, memory: tuple[Tensor, Tensor] | None) -> Tensor:
        if memory is not None:
            x = x + self.dropout(self.cross(self.norm2(x), *memory, mask))
        out: Tensor = x + self.dropout(self.feed(self.norm3(x)))
        return out


class Transformer(nn.Module):
    """Encoder, decoder, and one embedding for source, target and output (Press and Wolf 2017, arXiv:1608.05859).

    Small, after Vaswani et al. 2017, arXiv:1706.03762, with layer norm before each part, not after it.

    With the defaults and 10,000 pieces: 16.3 million parameters, all of whose gradients are dense.

    Args:
        vocab_size: pieces.
        width: size of the vectors, a multiple of ``heads``.
        hidden: width of the feed-forward networks.
        layers: of the encoder, and as many of the decoder.
        heads: of the attentions.
        dropout: share of what each part gives that is dropped.

    Raises:
        ValueError: ``width`` is no even multiple of ``heads``.
    """

    def __init__(
        self, vocab_size: int, *, width: int = 384, hidden: int = 1536, layers: int = 3, heads: int = 6, dropout: float
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"recipe.width={width}, recipe.heads={heads}: width must be a multiple of twice the heads")
        self.width, self.heads = width, heads
        self.embedding = nn.Embedding(vocab_size, width)
        encoder = [Layer(width, heads, hidden, dropout, decoder=False) for _ in range(layers)]
        decoder = [Layer(width, heads, hidden, dropout, decoder=True) for _ in range(layers)]
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Source [N, S] and the target so far [N, T] -> what each position says of the next piece, [N, T, width]."""
        memory, mask = self._encode(source)
        x = self._embed(target)
        for layer in self._decoder():
            x = layer(x, mask, layer.cross.read(memory))
        out: Tensor = self.decoder_norm(x)
        return out

    def logits(self, features: Tensor) -> Tensor:
        """[..., width] -> [..., vocab_size]."""
        return F.linear(features, self.embedding.weight)

    def start(self, source: Tensor) -> list[Tensor]:
        """What :meth:`step` needs of sources [N, S]: tensors whose first dimension is N."""
        memory, mask = self._encode(source)
        if mask is None:
            mask = torch.ones(len(source), 1, 1, source.shape[1], dtype=torch.bool, device=source.device)
        state = [mask]
        for layer in self._decoder():
            none = memory.new_zeros(len(source), self.heads, 0, self.width // self.heads)
            state += [*layer.cross.read(memory), none, none]
        return state

    def step(self, pieces: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The last pieces [N] -> logits of the next ones [N, vocab_size], and the new state."""
        x = self._embed(pieces[:, None], state[3].shape[2])
        mask, after = state[0], state[:1]
        for number, layer in enumerate(self._decoder()):
            keys, values, *before = state[4 * number + 1 : 4 * number + 5]
            x, past = layer.step(x, mask, (keys, values), (before[0], before[1]))
            after += [keys, values, *past]
        return self.logits(self.decoder_norm(x[:, 0])), after

    def _encode(self, source: Tensor) -> tuple[Tensor, Tensor | None]:
        real = source != PAD
        mask = None if bool(real.all()) else real[:, None, None]  # without one, attention is faster
        x = self._embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def _decoder(self) -> list[Layer]:
        return cast("list[Layer]", list(self.decoder))

    def _embed(self, pieces: Tensor, start: int = 0) -> Tensor:
        """Pieces [N, T], of which the first is at position ``start``; sines and cosines say the position."""
        place = torch.arange(start, start + pieces.shape[1], device=pieces.device, dtype=torch.float32)
        even = torch.arange(0, self.width, 2, device=pieces.device, dtype=torch.float32)
        rate = torch.exp(even * (-math.log(10_000.0) / self.width))
        angle = place[:, None] * rate
        position = torch.cat([angle.sin(), angle.cos()], 1)
        embedded: Tensor = self.embedding(pieces) * math.sqrt(self.width)
        out: Tensor = self.dropout(embedded + position.to(embedded.dtype))
        return out


class LSTM(nn.Module):
    """A bidirectional encoder, a decoder, and the paper's global attention with its ``general`` score.

    Luong et al. 2015, arXiv:1508.04025, without input feeding.

    Source, target and output share one embedding. What attention saw is not fed into the next step, so that the
    decoder's LSTM runs over a whole sentence at once in training.

    Args:
        vocab_size: pieces.
        width: size of the embedding.
        hidden: of the decoder's LSTM, even; the encoder's directions have half of it each.
        layers: of the encoder, and as many of the decoder.
        dropout: share of the embedding, of what layers give and of what attention gives that is dropped.

    Raises:
        ValueError: ``hidden`` is odd.
    """

    def __init__(
        self, vocab_size: int, *, width: int = 256, hidden: int = 512, layers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if hidden % 2:
            raise ValueError(f"recipe.hidden={hidden}: must be even, half for each direction of the encoder")
        between = dropout if layers > 1 else 0.0
        self.embedding = nn.Embedding(vocab_size, width)
        self.encoder = nn.LSTM(width, hidden // 2, layers, batch_first=True, dropout=between, bidirectional=True)
        self.decoder = nn.LSTM(width, hidden, layers, batch_first=True, dropout=between)
        self.score = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Source [N, S] and the target so far [N, T] -> what each position says of the next piece, [N, T, width]."""
        memory, last = self._encode(source)
        out, _ = self.decoder(self._embed(target), last)
        return self._attend(out, memory, source != PAD)

    def logits(self, features: Tensor) -> Tensor:
        """[..., width] -> [..., vocab_size]."""
        return F.linear(features, self.embedding.weight)

    def start(self, source: Tensor) -> list[Tensor]:
        """What :meth:`step` needs of sources [N, S]: tensors whose first dimension is N."""
        memory, (hidden, cell) = self._encode(source)
        return [memory, source != PAD, hidden.transpose(0, 1), cell.transpose(0, 1)]

    def step(self, pieces: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The last pieces [N] -> logits of the next ones [N, vocab_size], and the new state."""
        memory, real, *last = state
        before = tuple(each.transpose(0, 1).contiguous() for each in last)
        out, after = self.decoder(self._embed(pieces[:, None]), before)
        features = self._attend(out, memory, real)
        return self.logits(features[:, 0]), [memory, real, *(each.transpose(0, 1) for each in after)]

    def _embed(self, pieces: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.embedding(pieces) * self.embedding.embedding_dim**0.5)
        return out

    def _encode(self, source: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs [N, S, hidden], and the last states [layers, N, hidden], in which the directions are side by side."""
        lengths = (source != PAD).sum(1).cpu()
        packed = pack_padded_sequence(self._embed(source), lengths, batch_first=True, enforce_sorted=False)
        out, last = self.encoder(packed)
        memory, _ = pad_packed_sequence(out, batch_first=True, total_length=source.shape[1])
        hidden, cell = (torch.cat([each[0::2], each[1::2]], 2) for each in last)
        return memory, (hidden, cell)

    def _attend(self, query: Tensor, memory: Tensor, real: Tensor) -> Tensor:
        """[N, T, hidden] looks at [N, S, hidden] -> [N, T, width]."""
        weights = self.score(query) @ memory.transpose(1, 2)
        weights = weights.masked_fill(~real[:, None], -torch.inf).softmax(-1)
        out: Tensor = self.dropout(torch.tanh(self.combine(torch.cat([weights @ memory, query], 2))))
        return out
