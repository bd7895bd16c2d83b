"""An LSTM encoder-decoder with attention: Luong et al. 2015, arXiv:1508.04025, without input feeding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from recipes.nmt.tokenizer import PAD

__all__ = ["LSTM"]


class LSTM(nn.Module):
    """A bidirectional encoder, a decoder, and the paper's global attention with its ``general`` score.

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
