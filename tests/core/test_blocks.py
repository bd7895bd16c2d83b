"""Numbers in 8 bits with a power of two for 64 of them."""

import pytest
import torch

from lightning_compress import kernels
from lightning_compress.core import blocks

SIZES = [0, 1, 63, 64, 65, 1000, 100_003]


def drawn(numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)


def coded(values):
    out = torch.zeros(blocks.coded_bytes(len(values)), dtype=torch.uint8)
    blocks.encode(values, out)
    return out


@pytest.mark.parametrize("numel", SIZES)
def test_bytes_stand_for_numbers_and_numbers_for_the_same_bytes(numel):
    values, made = drawn(numel), coded(drawn(numel))
    assert blocks.coded_numel(len(made)) == numel
    back = blocks.decode(made)
    assert coded(back).equal(made)
    for own, other in zip(values.split(64), back.split(64), strict=True):
        assert (own - other).abs().max() <= own.abs().max() / 64 if numel else True


@pytest.mark.parametrize("numel", SIZES)
def test_kernels_write_what_tensor_operations_write(numel):
    found = []
    for choice in ("torch", "auto"):
        with kernels.using(choice):
            new, out, old = coded(drawn(numel, 1)), torch.empty(numel), coded(drawn(numel, 1))
            blocks.blend(old, 0.95, drawn(numel, 2), 0.05, new)
            largest = blocks.add_to(old, drawn(numel, 3), out)
            found.append((new.tolist(), out.tolist(), largest, coded(drawn(numel)).tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("choice", ["torch", "auto"])
def test_any_bytes_are_finite_numbers_and_extremes_become_zero(choice):
    with kernels.using(choice):
        generator = torch.Generator().manual_seed(0)
        assert blocks.decode(torch.randint(0, 256, (65 * 999,), generator=generator).to(torch.uint8)).isfinite().all()
        for extreme in (0.0, 1e-45, 1e-38, 3e38):
            assert not blocks.decode(coded(torch.full((100,), extreme))).any()
