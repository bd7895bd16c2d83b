"""Float32 rounded at random into bfloat16."""

import pytest
import torch

from lightning_compress.codecs.cast import StochasticRounding
from lightning_compress.core.workspace import CHUNK

CPU = torch.device("cpu")


def rounded(values, key):
    out = torch.empty(len(values), dtype=torch.bfloat16)
    StochasticRounding(len(values), CPU).round(values, out, key)
    return out


def test_each_number_becomes_one_of_its_neighbours():
    values = torch.randn(CHUNK + 1003, generator=torch.Generator().manual_seed(0)) * 1e3
    got = rounded(values, 3).float()
    step = 2.0 ** (torch.frexp(values)[1].float() - 8)
    assert bool(((got - values).abs() < step).all())
    assert not torch.equal(got, values.bfloat16().float())
    assert torch.equal(got, rounded(values, 3).float())
    assert not torch.equal(got, rounded(values, 4).float())


@pytest.mark.parametrize("value", [256.7, -1.0037, 1e-30, -3.3e38])
def test_right_on_average(value):
    number = torch.tensor(value)
    got = rounded(number.repeat(100_000), 5).double()
    step = 2.0 ** (int(torch.frexp(number)[1]) - 8)
    assert abs(float(got.mean()) - float(number)) < 4 * step / 2 / 100_000**0.5


def test_what_bfloat16_has_stays():
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 256.0, torch.finfo(torch.bfloat16).max]).repeat(1000)
    assert torch.equal(rounded(values, 7).float(), values)


def test_nothing_becomes_infinite():
    largest = torch.finfo(torch.float32).max
    got = rounded(torch.tensor([largest, -largest]).repeat(1000), 9)
    assert bool(got.isfinite().all())


def test_small_numbers_still_add_up():
    total = torch.full((5000,), 256.0).bfloat16()
    for step in range(100):
        total = rounded(total.float() + 0.25, step)
    assert abs(float(total.float().mean()) - 281) < 0.5
    assert torch.tensor(256.0).bfloat16() + 0.25 == 256  # as to the nearest they do not
