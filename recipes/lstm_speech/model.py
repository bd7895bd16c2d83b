"""Bidirectional LSTM layers under a CTC output: Graves, Mohamed, Hinton 2013, arXiv:1303.5778; from there to a text."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

__all__ = ["BLANK", "SpeechLSTM", "beam_search", "ctc_loss", "greedy"]

BLANK = 0
"""The symbol for nothing new."""


class SpeechLSTM(nn.Module):
    """Layers of LSTMs that read an utterance forwards and backwards, layer norm after each, one linear layer.

    Args:
        features: numbers per step.
        symbols: what can be written, and the blank.
        layers: 3 to 5 in the literature, at least 1.
        hidden: units per direction and layer.
        dropout: after each layer, the last one too, in [0, 1).

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self, features: int, symbols: int, *, layers: int = 3, hidden: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if layers < 1 or hidden < 1:
            raise ValueError(f"recipe.layers={layers}, recipe.hidden={hidden}: both at least 1; try 3 and 128")
        if not 0 <= dropout < 1:
            raise ValueError(f"recipe.dropout={dropout}: must be at least 0 and below 1; try 0.1")
        sizes = [features] + [2 * hidden] * (layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(size, hidden, bidirectional=True, batch_first=True) for size in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(2 * hidden) for _ in sizes)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * hidden, symbols)
        for layer in self.layers:
            for name, parameter in layer.named_parameters():
                if name.startswith("bias_ih"):  # open forget gates at the start (Jozefowicz et al. 2015)
                    nn.init.zeros_(parameter)
                    nn.init.ones_(parameter[hidden : 2 * hidden])
                elif name.startswith("bias_hh"):
                    nn.init.zeros_(parameter)

    def forward(self, batch: Tensor, lengths: Tensor) -> Tensor:
        """Features and lengths -> log-probabilities.

        Args:
            batch: float32 [N, T, features]; what is behind an utterance's length is never read.
            lengths: int64 [N] on the CPU, at least 1.

        Returns:
            float32 [N, T, symbols], whatever the precision of the layers.
        """
        packed = pack_padded_sequence(batch, lengths.cpu(), batch_first=True, enforce_sorted=False)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            packed, _ = layer(packed)
            data = self.dropout(norm(packed.data))
            packed = PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        hidden, _ = pad_packed_sequence(packed, batch_first=True, total_length=batch.shape[1])
        return F.log_softmax(self.output(hidden).float(), -1)


def ctc_loss(log_probabilities: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """CTC (Graves et al. 2006): minus the logarithm of the probability of a text, over its length; mean of the batch.

    An utterance that is too short for its text, whose probability is 0, counts as 0 and has no gradient.

    Args:
        log_probabilities: float32 [N, T, symbols].
        lengths: int64 [N], steps of each utterance.
        targets: int64 [N, U], symbols from 1; what is behind a text's length is never read.
        target_lengths: int64 [N], at least 1.

    Returns:
        float32 [].
    """
    device = log_probabilities.device
    there = device if device.type in ("cpu", "cuda") else torch.device("cpu")  # no other has a kernel for it
    with torch.autocast(device.type, enabled=False):
        scores = log_probabilities.float().transpose(0, 1).to(there)
        loss = F.ctc_loss(
            scores, targets.to(there), lengths.to(there), target_lengths.to(there), BLANK, zero_infinity=True
        )
    return loss.to(device)


NEVER = -math.inf


def greedy(log_probabilities: Tensor) -> list[int]:
    """The likeliest path, its repeats joined and its blanks left out.

    Args:
        log_probabilities: float32 [T, symbols] of one utterance.

    Returns:
        Symbols from 1.
    """
    return [symbol for symbol, _ in groupby(log_probabilities.argmax(-1).tolist()) if symbol != BLANK]


def beam_search(log_probabilities: Tensor, width: int) -> list[int]:
    """The likeliest text, over all of its paths: prefix search (Graves et al. 2006, section 3.2) with a beam.

    Every prefix keeps the probability of its paths that end in a blank apart from that of the others: only the former
    may go on with the symbol that the prefix ends with. A beam as wide as there are prefixes makes the search exact.

    Args:
        log_probabilities: float32 [T, symbols] of one utterance.
        width: prefixes that are kept after every step, at least 1.

    Returns:
        Symbols from 1.
    """
    steps: npt.NDArray[np.float64] = log_probabilities.detach().cpu().double().numpy()
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, NEVER)}  # (ends in a blank, does not)
    for step in steps:
        row = step.tolist()
        grown: dict[tuple[int, ...], list[float]] = {}
        for prefix, (blank, solid) in beam.items():
            both = _add(blank, solid)
            same = grown.setdefault(prefix, [NEVER, NEVER])
            same[0] = _add(same[0], both + row[BLANK])
            if prefix:
                same[1] = _add(same[1], solid + row[prefix[-1]])
            for symbol in range(1, len(row)):
                before = blank if prefix and symbol == prefix[-1] else both
                if before > NEVER:
                    longer = grown.setdefault((*prefix, symbol), [NEVER, NEVER])
                    longer[1] = _add(longer[1], before + row[symbol])
        best = sorted(grown.items(), key=lambda each: -_add(*each[1]))[:width]
        beam = {prefix: (blank, solid) for prefix, (blank, solid) in best}
    likeliest, _ = max(beam.items(), key=lambda each: _add(*each[1]))
    return list(likeliest)


def _add(one: float, other: float) -> float:
    """Logarithm of the sum of two numbers given by theirs."""
    if one < other:
        one, other = other, one
    return one if other == NEVER else one + math.log1p(math.exp(other - one))
