"""Texts as symbols, and strings of spoken digits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["ALPHABET", "WORDS", "Alphabet", "cuts"]


class Alphabet:
    """The characters that can be written; 0 is CTC's blank.

    Args:
        characters: in the order of their numbers from 1, each once.
    """

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._numbers = {character: number for number, character in enumerate(characters, 1)}

    @classmethod
    def of(cls, texts: Iterable[str]) -> Alphabet:
        """All characters of some texts, sorted."""
        return cls("".join(sorted(set().union(*texts))))

    def __len__(self) -> int:
        """Symbols, with the blank."""
        return len(self.characters) + 1

    def unknown(self, text: str) -> list[str]:
        """Characters of ``text`` that have no number, in order and each once."""
        return [character for character in dict.fromkeys(text) if character not in self._numbers]

    def encode(self, text: str) -> Tensor:
        """int64 [characters]; every character must be known."""
        return torch.tensor([self._numbers[character] for character in text], dtype=torch.int64)

    def decode(self, symbols: Sequence[int]) -> str:
        """The text; symbols from 1. Spaces at the ends and double ones, which no transcript has, are left out."""
        return " ".join("".join(self.characters[symbol - 1] for symbol in symbols).split())


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
