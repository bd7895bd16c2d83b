"""The two translators: sizes, masks, and that decoding step by step is what training does at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recipes.nmt.data import padded
from recipes.nmt.model import LSTM, Transformer
from recipes.nmt.tokenizer import BOS, EOS, PAD

VOCABULARY = 30
SMALL: dict[str, Any] = {"width": 16, "hidden": 32, "layers": 2, "dropout": 0.3}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(VOCABULARY, heads=2, **SMALL) if kind == "transformer" else LSTM(VOCABULARY, **SMALL)


@pytest.fixture(params=["transformer", "lstm"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return make(request.param).eval()


def sentences(count: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets of several lengths, padded."""
    numbers = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(EOS + 1, VOCABULARY, (length,), generator=numbers).tolist()

    return (
        padded([[*draw(3 + 2 * row), EOS] for row in range(count)]),
        padded([[BOS, *draw(max(1, 9 - row)), EOS] for row in range(count)]),
    )


def test_sixteen_million_parameters_with_one_embedding() -> None:
    model = Transformer(10_000, dropout=0.1)
    assert sum(p.numel() for p in model.parameters()) == 16_257_792
    assert [name for name, p in model.named_parameters() if 10_000 in p.shape] == ["embedding.weight"]


def test_all_gradients_are_dense_and_none_is_missing(model: nn.Module) -> None:
    source, target = sentences()
    loss = F.cross_entropy(model.logits(model(source, target[:, :-1])).flatten(0, 1), target[:, 1:].flatten())
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.layout == torch.strided
        assert parameter.grad.abs().sum() > 0, name


@torch.no_grad()
def test_step_by_step_is_all_at_once(model: nn.Module) -> None:
    source, target = sentences()
    expected = model.logits(model(source, target[:, :-1]))
    state = model.start(source)
    for place in range(target.shape[1] - 1):
        logits, state = model.step(target[:, place], state)
        real = target[:, place] != PAD
        torch.testing.assert_close(logits[real], expected[real, place], rtol=1e-4, atol=1e-5)
        assert all(len(each) == len(source) for each in state)


@torch.no_grad()
def test_padding_says_nothing(model: nn.Module) -> None:
    source, target = sentences()
    together = model(source, target[:, :-1])
    for row in range(len(source)):
        alone = model(source[row][source[row] != PAD][None], target[row][target[row] != PAD][None, :-1])
        torch.testing.assert_close(together[row : row + 1, : alone.shape[1]], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_piece_sees_what_follows(model: nn.Module) -> None:
    source, target = sentences()
    changed = target.clone()
    changed[:, 4:] = VOCABULARY - 1
    first, second = model(source, target), model(source, changed)
    torch.testing.assert_close(first[:, :4], second[:, :4])
    assert not torch.allclose(first[:, 4], second[:, 4])


@torch.no_grad()
def test_the_order_of_the_source_matters(model: nn.Module) -> None:
    source, target = sentences(1)
    swapped = source[:, [1, 0, *range(2, source.shape[1])]]
    assert not torch.allclose(model(source, target), model(swapped, target), atol=1e-4)


def test_dropout_only_in_training(model: nn.Module) -> None:
    source, target = sentences()
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"recipe\.width=20, recipe\.heads=4: .*twice the heads"):
        Transformer(VOCABULARY, width=20, heads=4, dropout=0.0)
    with pytest.raises(ValueError, match=r"recipe\.hidden=33: must be even"):
        LSTM(VOCABULARY, hidden=33)
