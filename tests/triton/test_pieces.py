"""Pieces of which several kernels are made, where a message would hardly show that they are wrong."""

import pytest
import torch

from lightning_compress.codecs.quantize.levels import LARGEST, fit
from lightning_compress.core.random import RandomBits, word_state

triton = pytest.importorskip("triton")
tl = triton.language

from lightning_compress.codecs.quantize import levels_triton  # noqa: E402
from lightning_compress.kernels.triton import random_bits  # noqa: E402


@triton.jit
def _fit(norms, sent, factors, top: tl.constexpr, limit: tl.constexpr, size: tl.constexpr):
    place = tl.arange(0, size)
    norm, factor = levels_triton.fit(tl.load(norms + place), top, limit)
    tl.store(sent + place, norm)
    tl.store(factors + place, factor)


@triton.jit(do_not_specialize=["start", "first", "move"])
def _draw(bits, start: tl.int64, first: tl.int64, move, rows: tl.constexpr, width: tl.constexpr):
    row = tl.arange(0, rows) * width
    drawn = random_bits.random_bits(start, first + row, move, width)
    tl.store(bits + row[:, None] + tl.arange(0, width)[None, :], drawn)


@pytest.mark.parametrize(("top", "limit"), [(7, LARGEST), (1, LARGEST), (127.5, 2.0**110)])
def test_factors_are_those_of_a_cpu_and_never_round_up(top, limit, device):
    norms = torch.randn(1024, generator=torch.Generator().manual_seed(3)).abs()
    norms *= torch.logspace(-34, 38, 1024)
    norms[:5] = torch.tensor([0.0, top * 2.0**-112, top * 2.0**-111, 3.4028234663852886e38, 2.0**110])
    sent, factors = fit(norms.double(), top, limit)
    assert (factors.double() * sent.double() <= 65536 * top).all()
    found = torch.empty(2, 1024, device=device)
    _fit[(1,)](norms.to(device), found[0], found[1], top, limit, 1024, enable_fp_fusion=False)
    assert found[0].cpu().equal(sent)
    assert found[1].cpu().equal(factors)


@pytest.mark.parametrize(("first", "move"), [(0, 0), (20, -32768), (2**34 + 4, 21845), (0, 1)])
def test_random_bits_follow_from_key_and_place(first, move, device):
    expected = RandomBits(256, torch.device("cpu")).draw(2**64 - 5, first, 256, move)
    bits = torch.empty(256, device=device)
    _draw[(1,)](bits, random_bits.signed(word_state(2**64 - 5, 0)), first, move or None, 4, 64)
    assert bits.cpu().equal(expected.float())
