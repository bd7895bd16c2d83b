"""A sparse backward pass of a convolution is the dense one of a gradient with its other output channels masked."""

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_compress.backward import enable
from tests.backward.reference import Keep, mask_of, whole


class Masked(nn.Module):
    """The bias is added behind the mask."""

    def __init__(self, layer, k):
        super().__init__()
        self.layer, self.k = layer, k

    def forward(self, x):
        y = Keep.apply(self.layer._conv_forward(x, self.layer.weight, None), self.k, mask_of)
        return y + self.layer.bias.view(-1, *[1] * (y.ndim - 2))


LAYERS = [
    lambda: nn.Conv2d(3, 8, 3, padding=1),
    lambda: nn.Conv2d(3, 8, (3, 4), stride=2, dilation=(1, 2), padding="valid"),
    lambda: nn.Conv2d(3, 8, (3, 4), padding="same"),
    lambda: nn.Conv2d(3, 8, 3, padding=2, padding_mode="circular"),
    lambda: nn.Conv1d(3, 8, 5, stride=2, padding=1),
    lambda: nn.Conv2d(3, 8, 1).to(memory_format=torch.channels_last),
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("make", LAYERS)
def test_equals_the_dense_backward_of_the_masked_gradient(make):
    layer = make()
    with torch.no_grad():
        for number, each in enumerate(layer.parameters()):
            each.copy_(whole(each.shape, seed=number))
    other = copy.deepcopy(layer)
    masked = Masked(other, 3)
    enable(nn.Sequential(layer), 3, output=True)
    for seed in range(4):
        inputs = []
        for model in (layer, masked):
            x = whole((4, 3, 12) if isinstance(layer, nn.Conv1d) else (4, 3, 7, 9), seed=seed).requires_grad_()
            y = model(x)
            y.backward(whole(y.shape, seed=10 + seed))
            inputs.append(x.grad)
        assert torch.equal(*inputs)
        assert torch.equal(layer.weight.grad, other.weight.grad)
        assert torch.equal(layer.bias.grad, other.bias.grad)
        if seed != 1:
            layer.zero_grad()
            other.zero_grad()


def test_one_image_without_a_batch():
    layer = nn.Conv2d(3, 8, 3)
    enable(nn.Sequential(layer), 2, output=True)
    x = torch.randn(3, 6, 6, requires_grad=True)
    assert layer(x).shape == (8, 4, 4)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert int((layer.weight.grad != 0).flatten(1).any(1).sum()) == 2


def test_memory_and_autocast():
    layer = nn.Conv2d(3, 8, 1, bias=False)
    enable(nn.Sequential(layer), 2, output=True, memory=1.0)
    given, kept = torch.zeros(8), torch.zeros(8)
    for seed in range(4):
        layer.zero_grad()
        y = layer(torch.ones(2, 3, 4, 4))
        y.backward(gradient := whole(y.shape, seed=seed))
        given += gradient.sum((0, 2, 3))
        kept += layer.weight.grad[:, 0, 0, 0]
    assert torch.allclose(kept + layer.sparsity.memory, given, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.ones(2, 3, 4, 4))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32


def test_the_batch_norm_behind_it_is_warned_of_once():
    blocks = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Flatten()]
    model = nn.Sequential(*blocks, nn.Linear(8, 2))
    with pytest.warns(UserWarning, match=r"follows 2 of the convolutions \(1 after 0\)") as caught:
        enable(model, 0.5)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Linear(8, 2)), 0.5)


@pytest.mark.parametrize(
    ("layer", "settings", "message"),
    [
        (nn.Conv2d(4, 8, 3, groups=2), {}, "in groups"),
        (nn.Conv2d(4, 8, 3), {"per_example": True}, "leave per_example out"),
    ],
)
def test_refused(layer, settings, message):
    with pytest.raises(ValueError, match=message):
        enable(nn.Sequential(layer), {"0": 0.5}, **settings)
