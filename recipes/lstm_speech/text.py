"""Characters as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["Alphabet"]


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
