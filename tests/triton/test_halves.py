"""Numbers of 16 bits, by kernels: residuals in bfloat16, and what casts seldom meet."""

import pytest
import torch

from lightning_compress.codecs import BF16, FP16
from lightning_compress.codecs.cast import StochasticRounding
from lightning_compress.core.layout import Layout
from tests.triton.test_messages import CPU


def test_rounded_at_random_as_on_a_cpu(device, by):
    values = torch.randn(5003, generator=torch.Generator().manual_seed(0)) ** 5
    values[7:9] = torch.tensor([3.4e38, -3.4e38])
    expected, actual = (torch.empty(5003, dtype=torch.bfloat16, device=where) for where in (CPU, device))
    by("auto")
    StochasticRounding(5003, CPU).round(values, expected, 2**64 - 3)
    by("triton")
    StochasticRounding(5003, device).round(values.to(device), actual, 2**64 - 3)
    assert actual.cpu().view(torch.int16).equal(expected.view(torch.int16))
    assert not expected.equal(values.bfloat16())


@pytest.mark.parametrize("codec", [BF16(), FP16()], ids=repr)
def test_ties_and_numbers_too_large_or_too_small(codec, device, by):
    halfway = torch.arange(1.0, 2.0, 1 / 512).repeat(3) * torch.tensor([1.0, -(2.0**-20), 2.0**-130]).repeat_interleave(
        512
    )
    vector = torch.cat([halfway, torch.tensor([3.4e38, -3.4e38, 65519.0, 65520.0, -7e4, 1e-45, -6e-8])])
    layout, messages = Layout.of([("weight", (len(vector),))]), []
    for choice, where in (("auto", CPU), ("triton", device)):
        by(choice)
        plan, left = codec.plan(layout, where, summands=3), vector.to(where, copy=True)
        message = torch.empty(plan.message_size, dtype=torch.uint8, device=where)
        plan.encode(left, message, 0)
        messages.append(torch.cat([message.cpu(), left.cpu().view(torch.uint8)]))
    assert messages[0].equal(messages[1])
