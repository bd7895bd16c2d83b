"""Differences of cells: those of the numbers, by a kernel as by tensor operations."""

import pytest
import torch

from lightning_compress import kernels
from lightning_compress.codecs.packing.planes import code_bytes, unpack_codes
from lightning_compress.gossip.lattice import Blocks, Lattice

CPU = torch.device("cpu")
STEP = 0.1


def lattices(bits):
    for choice in ("auto", "torch"):
        with kernels.using(choice):
            yield Lattice(bits, "nearest", CPU)


def bytes_for(numel, bits):
    return torch.full((code_bytes(numel, bits),), 255, dtype=torch.uint8)


def pair(numel, apart=0.01):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    return x, x + apart * torch.randn(numel, generator=torch.Generator().manual_seed(1))


def sent(lattice, x, first=0):
    packed = bytes_for(len(x), lattice.bits)
    return int(lattice.encode(x, Blocks.single(len(x), STEP, CPU), None, first, packed)), packed


def cells(packed, numel, bits):
    return torch.from_numpy(unpack_codes(packed.numpy(), numel, bits)).long() - 2 ** (bits - 1)


@pytest.mark.parametrize("numel", [0, 1, 1001, 2048, 5003])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_differences(bits, numel):
    x, close = pair(numel)
    half, found = 2 ** (bits - 1), []
    wanted = torch.floor(x.double() / STEP) - torch.floor(close.double() / STEP)
    for lattice in lattices(bits):
        word, packed = sent(lattice, x, 77)
        packed[numel * bits // 8 :] |= 255 << numel * bits % 8 & 255  # what fills the last byte says nothing
        out = bytes_for(numel, bits)
        assert lattice.differences(close, STEP, packed, 77, out) == (word, int(wanted.abs().max()) if numel else 0)
        assert cells(out, numel, bits).equal(wanted.long().clamp(-half, half - 1))
        assert not out[numel * bits // 8 :].bitwise_right_shift(numel * bits % 8).any()
        far = lattice.differences(close + 300, STEP, packed, 77, out)
        assert not numel or far[0] != word
        found.append((far, out.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_code_cannot_hold_is_clamped(bits):
    """A cell that is recovered may be one more above than a code of as many bits can say."""
    half = 2 ** (bits - 1)
    own = torch.tensor([0.75, 0.75, 0.75, 0.25, 0.25]) * STEP
    theirs = torch.tensor([half + 0.5, half - 0.5, 0.5, 0.5 - half, 0.5]) * STEP
    for lattice in lattices(bits):
        word, packed = sent(lattice, theirs)
        out = bytes_for(5, bits)
        assert lattice.differences(own, STEP, packed, 0, out) == (word, half)
        assert cells(out, 5, bits).tolist() == [half - 1, half - 1, 0, -half, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_has_diverged_is_not_recovered(bits, value):
    x, close = pair(1001)
    found = []
    for lattice in lattices(bits):
        word, packed = sent(lattice, x)
        odd, out = close.clone(), bytes_for(1001, bits)
        odd[1000] = value
        found.append((lattice.differences(odd, STEP, packed, 0, out), out.tolist()))
        assert found[-1][0][0] != word
    assert found[0] == found[1]


@pytest.mark.parametrize("numel", [0, 1, 1001, 2048, 5003])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_both_sides_move_by_the_same_float32(bits, numel):
    x, start = pair(numel)
    for factor in (0.5 * STEP, 1 / 3 * 0.7234567890123, 1e-30):
        moved = []
        for lattice in lattices(bits):
            _, packed = sent(lattice, x)
            change = cells(packed, numel, bits).float() * torch.tensor(factor, dtype=torch.float32)
            up, down = start.clone(), start.clone()
            lattice.add_differences(packed, factor, up)
            lattice.add_differences(packed, -factor, down)
            assert up.equal(start + change)
            assert down.equal(start - change)
            moved += [up, down]
        assert moved[0].equal(moved[2])
        assert moved[1].equal(moved[3])
