"""From a network's output to a text, against all paths."""

from __future__ import annotations

from itertools import groupby, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.lstm_speech.model import beam_search, greedy
from recipes.lstm_speech.text import ALPHABET, WORDS, Alphabet


def all_texts(log_probabilities: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The probability of every text, as the sum over all of its paths."""
    steps, symbols = log_probabilities.shape
    rows = log_probabilities.double().exp().tolist()
    texts: dict[tuple[int, ...], float] = {}
    for path in product(range(symbols), repeat=steps):
        chance = 1.0
        for row, symbol in zip(rows, path, strict=True):
            chance *= row[symbol]
        text = tuple(symbol for symbol, _ in groupby(path) if symbol)
        texts[text] = texts.get(text, 0.0) + chance
    return texts


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 4), st.sampled_from([0.3, 1.0, 4.0]))
def test_a_wide_beam_finds_the_likeliest_text(seed: int, steps: int, symbols: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    output = (sharpness * torch.randn(steps, symbols, generator=generator)).log_softmax(-1)
    texts = all_texts(output)
    found = tuple(beam_search(output, 10_000))
    assert texts[found] == pytest.approx(max(texts.values()), rel=1e-6)
    assert tuple(greedy(output)) in texts


def test_a_text_beats_the_likeliest_path() -> None:
    output = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()  # nothing: 0.36; a: 0.64, over three paths
    assert greedy(output) == []
    assert beam_search(output, 2) == [1]


def test_repeats_need_a_blank() -> None:
    def path(*symbols: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(symbols), 4).mul(20.0).log_softmax(-1)

    for decode in (greedy, lambda rows: beam_search(rows, 4)):
        assert decode(path(1, 1, 0, 1, 2, 2, 0, 3)) == [1, 1, 2, 3]
        assert decode(path(1, 1, 1)) == [1]
        assert decode(path(0, 0)) == []


def test_impossible_symbols() -> None:
    output = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]).log()
    assert beam_search(output, 3) == greedy(output) == [1]


def test_alphabet() -> None:
    assert ALPHABET.characters == " efghinorstuvwxz"
    text = " ".join(WORDS)
    assert ALPHABET.decode(ALPHABET.encode(text).tolist()) == text
    assert ALPHABET.encode(text).min() == 1
    assert ALPHABET.decode([1, 2, 1, 1, 3, 1]) == "e f"
    assert Alphabet("ab").unknown("abca c!") == ["c", " ", "!"]
