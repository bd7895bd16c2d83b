"""Steady state allocates nothing of the vector's size, by torch's account and by NumPy's."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.codecs import CODECS as KNOWN
from lightning_compress.codecs import FFT, QSGD, Codec, OneBit, RangeFloat, Rotated, TopK
from lightning_compress.contrib.codecs.adaptive import Adaptive
from lightning_compress.contrib.codecs.dct import DCT
from lightning_compress.contrib.codecs.qsgd_elias import QSGDElias
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.contrib.codecs.threshold import Threshold
from lightning_compress.contrib.codecs.wangni import Wangni
from tests.codecs.helpers import CPU, layout, make
from tests.helpers.memory import check_steady

NUMEL = (1 << 21) + 1234


OTHERS = [
    *(OneBit(scope="column"), QSGD(7, norm="l2"), Rotated(5), TernGrad(packing="base3")),
    RangeFloat(13),
    *(pytest.param(each, marks=pytest.mark.thorough) for each in (FFT(0.97), DCT(block=4096))),
    *(TopK(0.01, "parameter", "sampled", "1bit", "rice"), Threshold(3.0, 3.0), Adaptive(100)),
]
MANY = {Threshold, Adaptive, Wangni, QSGDElias}
"""Whose lists, of elements or of bits, are at default settings as long as a good part of the vector."""
CODECS = [*(kind() for kind in KNOWN.complete().values() if kind not in MANY), *OTHERS]


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
