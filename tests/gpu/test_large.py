"""Vectors of over 2^31 elements: the end of a long one is what the same numbers are alone."""

import pytest
import torch

from lightning_compress.codecs import EFSign, OneBit
from lightning_compress.layout import Layout

pytestmark = pytest.mark.gpu
NUMEL = 2**31 + 5 * 1024 + 17
TAIL = NUMEL - 2**31


@pytest.mark.parametrize("codec", [OneBit(), EFSign()], ids=repr)
def test_the_end_of_a_long_vector(codec):
    if torch.cuda.mem_get_info()[0] < 36e9:
        pytest.skip("needs 36 GB")
    device = torch.device("cuda")
    long = torch.randn(NUMEL, device=device)
    short = long[-TAIL:].clone()
    big, small = (codec.plan(Layout.of([("weight", (n,))]), device) for n in (NUMEL, TAIL))
    message, part = (torch.zeros(plan.message_size, dtype=torch.uint8, device=device) for plan in (big, small))
    big.encode(long, message, 1)
    small.encode(short, part, 1)
    assert long[-TAIL:].equal(short)
    bits = (TAIL + 7) // 8
    assert message[-bits:].equal(part[-bits:])
    out, one = torch.zeros(NUMEL, device=device), torch.zeros(TAIL, device=device)
    big.decode(message[None], out, 1.0, accumulate=False)
    small.decode(part[None], one, 1.0, accumulate=False)
    assert out[-TAIL:].equal(one)
