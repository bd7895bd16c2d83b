"""Which layers are changed, and what is refused when they are to be."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_compress.backward import enable
from tests.backward.reference import enabled


class Own(nn.Linear):
    """Computes something else."""

    def forward(self, x):
        return super().forward(x) * 2


def net(**layers):
    return nn.Sequential(
        nn.ModuleDict({"body": nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 20)), **layers}),
        nn.Linear(20, 4),
    )


def kept(model, k, **settings):
    enable(model, k, **settings)
    return {name: each.k for name, each in enabled(model).items()}


@pytest.mark.parametrize(
    ("k", "settings", "layers"),
    [
        (0.25, {}, {"0.body.0": 3, "0.body.2": 5}),
        (0.001, {}, {"0.body.0": 1, "0.body.2": 1}),
        (4, {"output": True}, {"0.body.0": 4, "0.body.2": 4, "1": 4}),
        (0.5, {"skip": ["*.0"]}, {"0.body.2": 10}),
        ({"*.2": 7, "0.*": 0.1}, {}, {"0.body.0": 1, "0.body.2": 7}),
        ({"*.2": 7}, {}, {"0.body.2": 7}),
        ({"1": 1}, {}, {"1": 1}),
        (1.0, {}, {"0.body.0": 10, "0.body.2": 20}),
    ],
)
def test_patterns(k, settings, layers):
    assert kept(net(), k, **settings) == layers


def tied():
    model = net()
    model.add_module("again", nn.Linear(10, 20))
    model.again.weight = model[0]["body"][2].weight
    model.add_module("out", nn.Linear(20, 2))
    return model


def quantised():
    model = net()
    model[0]["body"][2].weight = nn.Parameter(torch.zeros(20, 10, dtype=torch.int8), requires_grad=False)
    return model


def sparse():
    model = net()
    model[0]["body"][2].weight = nn.Parameter(torch.zeros(20, 10).to_sparse())
    return model


def normed():
    model = net()
    parametrizations.weight_norm(model[0]["body"][2])
    return model


@pytest.mark.parametrize(
    ("make", "k", "settings", "message"),
    [
        (net, 0, {}, "k=0 must be a whole number of outputs, 1 or more, or a fraction"),
        (net, -3, {}, "k=-3"),
        (net, 1.5, {}, "k=1.5"),
        (net, float("nan"), {}, "k=nan"),
        (net, True, {}, "k=True"),
        (net, {}, {}, "k={} names no layer"),
        (net, {"0.*": 0}, {}, "k['0.*']=0"),
        (net, 15, {}, "0.body.0: k=15 must be from 1 to its width, 10"),
        (net, {"body": 0.5}, {}, "k['body'] matches no layer"),
        (net, {"*": 0.5, "0.body.0": 0.1}, {}, "k['0.body.0'] matches no layer"),  # the first pattern took it
        (net, {"0.body.1": 0.5}, {}, "k['0.body.1']: a layer of type ReLU cannot"),
        (net, 0.5, {"skip": ["nothing"]}, "skip='nothing' matches no layer"),
        (net, 0.5, {"skip": "0.*"}, "skip='0.*' must be a list"),
        (net, 0.5, {"memory": 2}, "memory=2"),
        (net, 0.5, {"per_example": True, "group": object()}, "per_example=True"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), 0.5, {}, "the output layer, '0', is, unless output=True"),
        (lambda: nn.Sequential(nn.ReLU()), 0.5, {}, "k['*'] matches no layer"),
        (tied, 0.5, {}, "0.body.2: weight is tied"),
        (quantised, 0.5, {}, "0.body.2: weight is quantised or of a special kind (Parameter, torch.int8)"),
        (sparse, 0.5, {}, "0.body.2: weight is sparse"),
        (normed, 0.5, {}, "its weight is parametrized"),
        (lambda: net(own=Own(4, 4)), {"0.own": 0.5}, {}, "Own is a subclass of Linear"),
        (lambda: net(at=nn.MultiheadAttention(8, 2)), {"0.at": 0.5}, {}, "MultiheadAttention computes its projections"),
        (lambda: net(at=nn.MultiheadAttention(8, 2)), {"0.at.out_proj": 0.5}, {}, "MultiheadAttention computes"),
        (lambda: net(lazy=nn.LazyLinear(4)), 0.5, {}, "has no shape yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_refused_before_anything_is_changed(make, k, settings, message):
    model = make()
    with pytest.raises(ValueError, match=re.escape(message)):
        enable(model, k, **settings)
    assert not enabled(model)


def test_what_cannot_be_sparse_is_passed_over():
    model = net(own=Own(4, 4), attention=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    assert set(kept(model, 0.5)) == {"0.body.0", "0.body.2", "0.attention.linear1", "0.attention.linear2"}
    x = torch.randn(2, 3, 8)
    model[0]["attention"](x).sum().backward()


def test_a_module_with_two_names_is_one():
    shared = nn.Linear(8, 8)
    assert kept(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 2)), 2) == {"0": 2}


def recurrent():
    return nn.ModuleDict({"rnn": nn.LSTM(8, 10), "cell": nn.GRUCell(8, 10), "out": nn.Linear(10, 4)})


def transformer():
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("make", "k", "named"),
    [
        (recurrent, 0.2, "rnn, cell would keep 20 %"),
        (recurrent, {"cell": 2, "rnn": 0.5}, "cell would keep 20 %"),
        (transformer, 0.16, "1.linear1, 1.linear2 would keep"),
        (recurrent, 0.3, ""),
        (transformer, {"1.*": 0.5, "0": 1}, ""),  # beside no norm
        (net, 0.05, ""),
        (lambda: nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 20, 3), nn.Linear(4, 4)), 0.05, ""),
    ],
)
def test_too_few_outputs_where_sequences_pass_are_warned_of(make, k, named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        enable(make(), k)
    said = [str(each.message) for each in caught if "meProp" in str(each.message)]
    assert len(said) == bool(named)
    if named:
        assert f"meProp: {named}" in said[0]
        assert "Keep half, by k=0.5 or k={" in said[0]
        assert re.search(r"by skip=\['[\w.]+', \.\.\.\]", said[0])


def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        enable(recurrent(), 0.2)
    return len(caught)


def test_one_rank_warns_for_all(pools):
    assert pools[2].run(warned) == [1, 0]
