"""Strings of spoken digits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from recipes.lstm_speech.text import Alphabet

__all__ = ["ALPHABET", "WORDS", "cuts"]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""How digits are written: with words of characters, WER (words) and CER (characters) are two figures, as in speech."""
ALPHABET = Alphabet.of([*WORDS, " "])


def cuts(digits: Sequence[int], rng: np.random.Generator) -> Iterator[list[int]]:
    """Endless strings of 3 to 5 places in ``digits``: a random order of all of them, cut up, then another order.

    Args:
        digits: at least 5 recordings' numbers, or whatever there is to be joined.
        rng: decides.

    Yields:
        3 to 5 indices into ``digits``; each one is used as often as the others, but for the last rounds.
    """
    waiting: list[int] = []
    while True:
        length = int(rng.integers(3, 6))
        while len(waiting) < length:
            waiting += rng.permutation(len(digits)).tolist()
        yield waiting[:length]
        waiting = waiting[length:]
