"""Steady state allocates nothing of the vector's size, by torch's account and by NumPy's."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.codecs import CODECS as KNOWN
from lightning_compress.codecs import (
    DCT,
    FFT,
    QSGD,
    Adaptive,
    Codec,
    OneBit,
    RangeFloat,
    Rotated,
    TernGrad,
    Threshold,
    TopK,
    Wangni,
)
from tests.codecs.helpers import CPU, layout, make
from tests.helpers.memory import check_steady

NUMEL = (1 << 21) + 1234


OTHERS = [
    *(OneBit(scope="column"), QSGD(7, norm="l2"), Rotated(5), TernGrad(packing="base3")),
    RangeFloat(13),
    *(pytest.param(each, marks=pytest.mark.thorough) for each in (FFT(0.97), DCT(block=4096))),
    *(TopK(0.01, "parameter", "sampled", "1bit", "rice"), Threshold(3.0, 3.0), Adaptive(100)),
]
MANY = {Threshold, Adaptive, Wangni}
"""Whose lists of elements are, at default settings, as long as a good part of the vector."""
CODECS = [*(kind() for kind in KNOWN.values() if kind not in MANY), *OTHERS]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_no_large_allocations(codec: Codec) -> None:
    plan = codec.plan(layout(NUMEL), CPU)
    vector, out = make("normal", NUMEL), torch.zeros(NUMEL)
    messages = torch.zeros(2, plan.message_size, dtype=torch.uint8)

    def step() -> None:
        plan.encode(vector, messages[0], 1)
        messages[1] = messages[0]
        plan.decode(messages, out, 0.5, True)

    check_steady(step)
