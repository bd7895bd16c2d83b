"""Vectors of over 2^28 and 2^31 elements: the end of a long one is what the same numbers are alone."""

import pytest
import torch

from lightning_compress.codecs import EFSign, OneBit, RangeFloat
from lightning_compress.core.layout import Layout

pytestmark = pytest.mark.gpu
TAIL = 5 * 4096 + 17


@pytest.mark.parametrize("whole", [2**28, 2**31])
@pytest.mark.parametrize("codec", [OneBit(), EFSign(), RangeFloat(mantissa=4)], ids=repr)
def test_the_end_of_a_long_vector(codec, whole):
    numel = whole + TAIL
    if torch.cuda.mem_get_info()[0] < 36e9:
        pytest.skip("needs 36 GB")
    device = torch.device("cuda")
    long = torch.randn(numel, device=device)
    short = long[-TAIL:].clone()
    big, small = (codec.plan(Layout.of([("weight", (n,))]), device) for n in (numel, TAIL))
    message, part = (torch.zeros(plan.message_size, dtype=torch.uint8, device=device) for plan in (big, small))
    big.encode(long, message, 1)
    small.encode(short, part, 1)
    assert long[-TAIL:].equal(short)
    codes = (TAIL + 7) // 8  # at the least
    assert message[-codes:].equal(part[-codes:])
    out, one = torch.zeros(numel, device=device), torch.zeros(TAIL, device=device)
    big.decode(message[None], out, 1.0, accumulate=False)
    small.decode(part[None], one, 1.0, accumulate=False)
    assert out[-TAIL:].equal(one)
