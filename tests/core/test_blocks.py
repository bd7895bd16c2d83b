"""Numbers in 8 bits with a power of two for 64 of them."""

import pytest
import torch

from lightning_compress import kernels
from lightning_compress.core import blocks
from lightning_compress.core.vector import add_errors

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


TREATED = (blocks.AVERAGE, blocks.RESET, blocks.AVERAGE, blocks.KEEP, blocks.AVERAGE, blocks.AVERAGE)
LENGTHS = (63, 1000, 5003, 64, 65, 7)
CODED = (65, 200, 2000, 0, -1, 1300)
"""Of some parameters, where the codes of each begin: in any order, and one has none."""


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_kernels_write_what_tensor_operations_write(share):
    found = []
    segments = blocks.Segments((0,) * 6, LENGTHS, CODED, TREATED)
    for choice in ("torch", "auto"):
        with kernels.using(choice):
            old = torch.randint(0, 256, (8000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
            new, own = torch.zeros_like(old), old.clone()
            for out in (new, own):
                blocks.blend(segments, old if out is new else own, 0.95, drawn(sum(LENGTHS), 2), share, out)
            added, flag = drawn(sum(LENGTHS), 3), torch.zeros(())
            add_errors(segments, old, added, flag)
            found.append((new, own, added))
    for one, other in zip(*found, strict=True):
        assert one.equal(other)
    assert new[: blocks.coded_bytes(64)].equal(old[: blocks.coded_bytes(64)])
    before = drawn(sum(LENGTHS), 3)
    same = [one.equal(other) for one, other in zip(added.split(LENGTHS), before.split(LENGTHS), strict=True)]
    assert same == [False, True, False, True, True, False]


@pytest.mark.parametrize("choice", ["torch", "auto"])
def test_any_bytes_are_finite_numbers_and_extremes_become_zero(choice):
    with kernels.using(choice):
        generator = torch.Generator().manual_seed(0)
        assert blocks.decode(torch.randint(0, 256, (65 * 999,), generator=generator).to(torch.uint8)).isfinite().all()
        for extreme in (0.0, 1e-45, 1e-38, 3e38):
            assert not blocks.decode(coded(torch.full((100,), extreme))).any()
