"""From a network's output to a text."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recipes.lstm_speech.model import BLANK

__all__ = ["beam_search", "greedy"]

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
