"""Strings of spoken digits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recipes.lstm_speech.text import Alphabet

__all__ = ["ALPHABET", "WORDS", "cuts"]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""How digits are written: with words of characters, WER (words) and CER (characters) are two figures, as in speech."""
ALPHABET = Alphabet.of([*WORDS, " "])


def cuts(count: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Endless strings of 3 to 5 numbers below ``count``: a random order of all of them, cut up, then another order.

    Args:
        count: how many recordings there are, at least 1.
        rng: decides.

    Yields:
        3 to 5 numbers; none is used more than once more often than another.
    """
    waiting: list[int] = []
    while True:
        length = int(rng.integers(3, 6))
        while len(waiting) < length:
            waiting += rng.permutation(count).tolist()
        yield waiting[:length]
        waiting = waiting[length:]
