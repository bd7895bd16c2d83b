"""Beam search against all translations there are, and greedy search against a plain loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from recipes.nmt.search import beam_search
from recipes.nmt.tokenizer import BOS, EOS, PAD
from tests.recipes.test_nmt_model import make, sentences

WORDS = 4
"""Pieces of the tiny language that are words."""


class Tiny:
    """A language whose next piece depends on the two before it and on the sentence, at random."""

    def __init__(self, count: int, seed: int, eos: float = 0.0) -> None:
        size = EOS + 1 + WORDS
        self.table = 2 * torch.randn(count, size, size, size, generator=torch.Generator().manual_seed(seed))
        self.table[..., EOS] += eos

    def start(self, source: Tensor) -> list[Tensor]:
        return [source[:, 0], torch.full_like(source[:, 0], BOS)]

    def step(self, pieces: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        row, before = state
        return self.table[row, before, pieces].clone(), [row, pieces]

    def score(self, row: int, pieces: list[int], alpha: float) -> float:
        table = self.table[row].clone()
        table[..., [PAD, BOS]] = -torch.inf
        logp, last = table.log_softmax(-1), [BOS, BOS]
        total = 0.0
        for piece in pieces:
            total += logp[last[0], last[1], piece].item()
            last = [last[1], piece]
        return total / ((5 + len(pieces)) / 6) ** alpha

    def best(self, row: int, longest: int, alpha: float) -> list[int]:
        """The best of all translations that end in time."""
        words = [1, *range(EOS + 1, EOS + 1 + WORDS)]
        every = (list(w) for n in range(longest) for w in itertools.product(words, repeat=n))
        return max(every, key=lambda each: self.score(row, [*each, EOS], alpha))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_as_wide_as_the_language_finds_the_best(seed: int, alpha: float) -> None:
    tiny = Tiny(3, seed)
    found = beam_search(tiny, torch.arange(3)[:, None], beam=5**4, longest=4, alpha=alpha)
    assert found == [tiny.best(row, 4, alpha) for row in range(3)]


def test_a_wider_beam_is_seldom_worse() -> None:
    tiny = Tiny(40, 0)
    scores = {}
    for beam in (1, 4, 30):
        found = beam_search(tiny, torch.arange(40)[:, None], beam=beam, longest=6, alpha=0.0)
        scores[beam] = sum(tiny.score(row, [*pieces, EOS], 0.0) for row, pieces in enumerate(found))
    assert scores[1] < scores[4] < scores[30]


def wild(kind: str) -> nn.Module:
    """A model that says different things to different sentences, some of which end early."""
    model = make(kind).eval()
    scale, haste = {"transformer": (1.0, 2.5), "lstm": (3.0, 1.0)}[kind]
    for parameter in model.parameters():
        parameter.data *= scale if parameter.ndim > 1 else 1.0
    weight, bias = model.embedding.weight, torch.zeros(len(model.embedding.weight))
    bias[EOS] = haste
    model.logits = lambda features: nn.functional.linear(features, weight, bias)
    return model


def greedy(model: nn.Module, source: Tensor, longest: int) -> list[int]:
    """One sentence, piece by piece, the whole target anew each time."""
    pieces = [BOS]
    for _ in range(longest):
        logits = model.logits(model(source[None], torch.tensor([pieces])))[0, -1]
        logits[[PAD, BOS]] = -torch.inf
        if (piece := int(logits.argmax())) == EOS:
            break
        pieces.append(piece)
    return pieces[1:]


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
@torch.no_grad()
def test_the_narrowest_beam_is_greedy_search(kind: str) -> None:
    model = wild(kind)
    source, _ = sentences(12)
    expected = [greedy(model, row[row != PAD], 10) for row in source]
    assert len({len(each) for each in expected}) > 3
    assert beam_search(model, source, beam=1, longest=10) == expected


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_company_does_not_matter(kind: str) -> None:
    model = wild(kind)
    source, _ = sentences(12)
    together = beam_search(model, source, beam=4, longest=10, alpha=1.0)
    assert together == [beam_search(model, row[row != PAD][None], beam=4, longest=10, alpha=1.0)[0] for row in source]


def test_what_does_not_end_is_cut() -> None:
    found = beam_search(Tiny(2, 0, eos=-1e4), torch.arange(2)[:, None], beam=3, longest=5)
    assert [len(each) for each in found] == [5, 5]
    assert beam_search(Tiny(2, 0, eos=1e4), torch.arange(2)[:, None], beam=3, longest=5) == [[], []]
