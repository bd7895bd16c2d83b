"""Steady state allocates nothing of the vector's size, by torch's account and by NumPy's."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.codecs import (
    DCT,
    FFT,
    QSGD,
    Adaptive,
    Codec,
    EFSign,
    Natural,
    OneBit,
    RandomK,
    RangeFloat,
    Rotated,
    TernGrad,
    Threshold,
    TopK,
)
from tests.codecs.helpers import CPU, layout, make
from tests.helpers.memory import check_steady

NUMEL = (1 << 21) + 1234


@pytest.mark.parametrize(
    "codec",
    [
        *(OneBit(), OneBit(scope="column"), EFSign(), QSGD(), QSGD(7, norm="l2"), Rotated(5), Natural()),
        *(RangeFloat(), RangeFloat(13), FFT(), FFT(0.97), DCT(), DCT(block=4096)),
        *(TopK(0.01, "parameter", "sampled", "1bit", "rice"), Threshold(3.0, 3.0), Adaptive(100)),
        *(TernGrad(), TernGrad(packing="base3"), RandomK()),
    ],
    ids=repr,
)
def test_no_large_allocations(codec: Codec) -> None:
    plan = codec.plan(layout(NUMEL), CPU)
    vector, out = make("normal", NUMEL), torch.zeros(NUMEL)
    messages = torch.zeros(2, plan.message_size, dtype=torch.uint8)

    def step() -> None:
        plan.encode(vector, messages[0], 1)
        messages[1] = messages[0]
        plan.decode(messages, out, 0.5, True)

    check_steady(step)
