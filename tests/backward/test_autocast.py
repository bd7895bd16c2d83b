"""Layers whose backward pass is ours have the dtypes of PyTorch's own under autocast."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_compress.backward import enable
from lightning_compress.backward.sufficient_factors.factored_layer import Layer
from tests.helpers.processor import needs_lstm_in_bfloat16

pytestmark = pytest.mark.filterwarnings("ignore:meProp. layer would keep")


def dtypes(found):
    if isinstance(found, Tensor):
        return [found.dtype]
    return [dtype for each in found if each is not None for dtype in dtypes(each)]


def factored(layer):
    Layer("", layer).switch(on=True)


def sparse(layer):
    enable(nn.Sequential(layer), 5, output=True)


@pytest.mark.parametrize(
    ("layer", "shape", "ours"),
    [
        (nn.Linear(6, 8), (4, 6), sparse),
        (nn.Linear(6, 8), (4, 6), factored),
        (nn.Conv1d(6, 8, 3), (4, 6, 9), sparse),
        (nn.LSTM(6, 8), (5, 4, 6), sparse),
        (nn.GRU(6, 8), (5, 4, 6), sparse),
        (nn.LSTMCell(6, 8), (4, 6), sparse),
        (nn.GRUCell(6, 8), (4, 6), sparse),
    ],
    ids=["linear", "factors", "conv", "lstm", "gru", "lstm cell", "gru cell"],
)
def test_float64_is_left_alone(layer, shape, ours):
    layer, x = copy.deepcopy(layer).double(), torch.randn(shape, dtype=torch.double)
    results = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(x)
        results.append(found[0] if isinstance(found, tuple) else found)
        ours(layer)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("given", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "packed LSTM", "ragged LSTM", "ragged GRU", "LSTMCell", "GRUCell"])
def test_states_have_the_ordinary_dtypes(kind, dtype, given):
    if kind in ("LSTM", "packed LSTM"):
        needs_lstm_in_bfloat16()
    layer, x = getattr(nn, kind.split()[-1])(6, 8), torch.randn(3, 3, 6, dtype=dtype)
    if "Cell" in kind:
        x = x[0]
    elif " " in kind:
        x = pack_sequence([*x[:2], x[2, : 3 if "packed" in kind else 2]])
    hx = None if given is None else torch.zeros(*([] if "Cell" in kind else [1]), 3, 8, dtype=given)
    states = (hx, hx) if hx is not None and "LSTM" in kind else hx
    with torch.autocast("cpu", torch.bfloat16):
        expected = dtypes(layer(x, states))
    enable(nn.Sequential(layer), 5, output=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, states)
    assert dtypes(found) == expected
    output = found[0] if isinstance(found, tuple) else found
    (output.data if isinstance(output, PackedSequence) else output).float().sum().backward()
    assert all(each.grad.dtype == torch.float32 and each.grad.isfinite().all() for each in layer.parameters())
