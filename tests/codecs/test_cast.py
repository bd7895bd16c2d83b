"""Casts: saturation, and sums that cannot overflow."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.codecs import BF16, FP16
from lightning_compress.codecs.cast import Cast
from tests.codecs.helpers import CPU, layout, trip


@pytest.mark.parametrize("codec", [FP16(), BF16()], ids=repr)
@pytest.mark.parametrize("summands", [1, 2, 3, 7, 64, 1000, 3000])
def test_a_sum_of_saturated_messages_stays_finite(codec: Cast, summands: int) -> None:
    largest = torch.finfo(codec.sum_dtype).max
    vector = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    plan = codec.plan(layout(2), CPU, summands)
    message = torch.empty(4, dtype=torch.uint8)
    plan.encode(vector, message, 0)
    assert torch.isfinite(vector).all()
    one = message.view(codec.sum_dtype)
    assert largest / summands / 2 <= one[0] <= largest / summands
    total = torch.zeros(2, dtype=codec.sum_dtype)
    for _ in range(summands):
        total += one
    assert torch.isfinite(total).all()
    assert codec.sum_dtype in (torch.float16, torch.bfloat16)


def test_what_fp16_cannot_hold_stays() -> None:
    decoded, residual, _ = trip(FP16(), torch.tensor([70000.0, 1e-9, 1 + 2.0**-11, -65520.0]))
    assert decoded.tolist() == [65504.0, 0.0, 1.0, -65504.0]
    assert residual.tolist() == [4496.0, pytest.approx(1e-9), 2.0**-11, -16.0]
