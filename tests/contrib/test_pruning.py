"""Neurons that are removed: what is left computes what it did without them, and the optimizer goes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_compress.contrib.pruning import chains, check_optimizers, cut, followers, shrink

KEEP = torch.tensor([0, 2, 3, 7])
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda given: torch.optim.SGD(given, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda given: torch.optim.Adam(given, 0.01, amsgrad=True),
    "adamw": lambda given: torch.optim.AdamW(given, 0.01),
    "rmsprop": lambda given: torch.optim.RMSprop(given, 0.01),
    "groups": lambda given: torch.optim.SGD([{"params": [each], "lr": 0.1} for each in given], momentum=0.9),
}


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 6, bias=bias))
    return nn.Sequential(nn.Linear(5, 8, bias=bias), inner, nn.Tanh(), nn.Linear(6, 2))


def test_chains_are_found() -> None:
    assert chains(network()) == {"0": "1.2", "1.2": "3"}
    broken = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Flatten(), nn.Linear(4, 4))
    assert chains(nn.ModuleDict({"a": broken, "b": nn.Linear(2, 2)})) == {}


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_left_computes_as_if_the_others_were_zero(bias: bool) -> None:
    model, x = network(bias).eval(), torch.randn(3, 5)
    wanted = copy.deepcopy(model)
    with torch.no_grad():
        gone = [row for row in range(8) if row not in KEEP]
        wanted[1][2].weight[:, gone] = 0
    cut(model, "0", "1.2", KEEP)
    torch.testing.assert_close(model(x), wanted(x))
    assert (model[0].out_features, model[1][2].in_features) == (4, 4)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_optimizer_goes_on_with_what_it_knew(kind: str) -> None:
    """As if neurons that are to go had no way out, and no way in, all the time."""
    model = network()
    with torch.no_grad():
        gone = [row for row in range(8) if row not in KEEP]
        model[0].weight[gone], model[0].bias[gone], model[1][2].weight[:, gone] = 0, 0, 0
    twin = copy.deepcopy(model)
    optimizers = [OPTIMIZERS[kind](list(each.parameters())) for each in (model, twin)]
    for step in range(4):
        if step == 2:
            cut(model, "0", "1.2", KEEP, [optimizers[0]])
            assert sum(len(group["params"]) for group in optimizers[0].param_groups) == 6
            assert {id(each) for each in optimizers[0].state} == {id(each) for each in model.parameters()}
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            torch.manual_seed(step)
            each.eval()(torch.randn(7, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model[0].weight, twin[0].weight[KEEP])
    torch.testing.assert_close(model[0].bias, twin[0].bias[KEEP])
    torch.testing.assert_close(model[1][2].weight, twin[1][2].weight[:, KEEP])
    torch.testing.assert_close(model[3].weight, twin[3].weight)


def test_a_smaller_state_dict_is_loaded() -> None:
    model = network()
    cut(model, "0", "1.2", KEEP)
    cut(model, "1.2", "3", torch.tensor([1, 5]))
    other = shrink(network(), model.state_dict())
    other.load_state_dict(model.state_dict())
    assert [tuple(each.shape) for each in other.parameters()] == [tuple(each.shape) for each in model.parameters()]


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.conv, self.narrow = nn.Conv1d(5, 8, 1), nn.Linear(4, 8)


@pytest.mark.parametrize(
    ("layers", "pairs", "words"),
    [
        (["first"], {}, "must know which layer takes the outputs of first"),
        (["conv"], {}, "conv is Conv1d"),
        (["first"], {"first": "conv"}, "not another nn.Linear"),
        (["first"], {"first": "nothing"}, "not there"),
        (["first"], {"first": "narrow"}, "takes 4 inputs, and first has 8"),
        (["first", "second"], {"first": "third", "second": "third"}, "follows several layers"),
        (["first"], {"first": "second", "second": "third"}, "not a layer that meProp has changed"),
    ],
)
def test_what_cannot_be_cut_is_refused(layers: list[str], pairs: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        followers(Free(), layers, pairs)


def test_tied_weights_and_odd_optimizers_are_refused() -> None:
    model = Free()
    model.third.weight = nn.Parameter(torch.zeros(8, 8))
    model.second.weight = model.third.weight
    with pytest.raises(ValueError, match="tied"):
        followers(model, ["first"], {"first": "second"})
    with pytest.raises(ValueError, match="LBFGS"):
        check_optimizers([torch.optim.LBFGS(model.parameters())])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.first.weight] = {"rows": torch.zeros(8)}
    with pytest.raises(ValueError, match=r"keeps rows \(8,\) of first.weight"):
        cut(model, "first", "second", KEEP, [optimizer])
    assert model.first.out_features == 8
