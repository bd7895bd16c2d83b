"""Residuals in bfloat16, rounded by a kernel."""

import torch

from lightning_compress.codecs.bfloat16 import StochasticRounding


def test_rounded_at_random_as_on_a_cpu(device, by):
    values = torch.randn(5003, generator=torch.Generator().manual_seed(0)) ** 5
    values[7:9] = torch.tensor([3.4e38, -3.4e38])
    expected, actual = (torch.empty(5003, dtype=torch.bfloat16, device=where) for where in ("cpu", device))
    by("auto")
    StochasticRounding(5003, torch.device("cpu")).round(values, expected, 2**64 - 3)
    by("triton")
    StochasticRounding(5003, device).round(values.to(device), actual, 2**64 - 3)
    assert actual.cpu().view(torch.int16).equal(expected.view(torch.int16))
    assert not expected.equal(values.bfloat16())
