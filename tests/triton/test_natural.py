"""Numbers that a random number brings to a power of two exactly, by the kernel of ``natural``."""

import torch

from lightning_compress.codecs import Natural
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits
from tests.triton.test_messages import CPU


def test_what_reaches_the_next_power_by_its_last_bit_is_rounded_up(device, by):
    noise = RandomBits(4096, CPU).draw(7, 0, 4096).int() & 0xFFFF
    vector = ((127 << 23) + (1 << 23) - ((noise | 1) << 7)).view(torch.float32).to(device)
    vector[::2] *= -(2.0**127)
    by("triton")
    plan = Natural(64).plan(Layout.of([("weight", (4096,))]), device)
    message = torch.empty(plan.message_size, dtype=torch.uint8, device=device)
    plan.encode(vector.clone(), message, 7)
    out = torch.empty_like(vector)
    plan.decode(message[None], out, 1.0, accumulate=False)
    assert (out[1::2] == 2).all()
    assert (out[::2] == -(2.0**127)).all()  # the next one is no float32
