"""Differences of cells: those of the numbers, by a kernel as by tensor operations."""

import pytest
import torch

from lightning_compress import kernels
from lightning_compress.gossip.lattice import Blocks, Lattice


@pytest.mark.parametrize("numel", [0, 1, 1001])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_differences(bits, numel):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    close = x + 0.01 * torch.randn(numel, generator=torch.Generator().manual_seed(1))
    step, packed = 0.1, torch.empty(-(-numel * bits // 8), dtype=torch.uint8)
    block = Blocks(torch.tensor([numel]), torch.tensor([step], dtype=torch.float64))
    found = []
    for choice in ("auto", "torch"):
        with kernels.using(choice):
            lattice = Lattice(bits, "nearest", torch.device("cpu"))
        sent = int(lattice.encode(x, block, None, 0, packed))
        word, largest, cells = lattice.differences(close, step, packed, 7)
        assert word == sent
        wanted = torch.floor(x.double() / step) - torch.floor(close.double() / step)
        assert cells.double().equal(wanted)
        assert largest == (int(wanted.abs().max()) if numel else 0)
        far = lattice.differences(close + 300, step, packed, 7)
        assert not numel or far[0] != sent
        assert not numel or int(far[2].abs().max()) <= 8
        found.append((far[0], far[1], far[2].tolist()))
    assert found[0] == found[1]
