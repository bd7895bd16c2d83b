"""Questions and answers, byte for byte: kernels and tensor operations move models by the same numbers."""

import pytest
import torch

from lightning_compress import kernels
from lightning_compress.codecs.packing.planes import pack_codes, unpack_codes
from lightning_compress.contrib.asynchronous import shared_model
from lightning_compress.contrib.asynchronous.modulo_pairs import ModuloAverage
from lightning_compress.contrib.asynchronous.pairwise import AGAIN, CELLS, CHANGE, CODES, MODEL, PairwiseAverage
from lightning_compress.contrib.asynchronous.shared_model import CHUNK, SharedModel
from lightning_compress.gossip.moniqua import Moniqua
from tests.contrib.asynchronous.helpers import Direct

NUMEL = 2 * CHUNK + 1001
"""Three chunks; the last one fills no byte at 4 bits."""
ALL = [None, 8, 4]


def models(apart=0.01):
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(NUMEL, generator=generator)
    theirs = own + apart * (2 * torch.rand(NUMEL, generator=generator) - 1)
    return [SharedModel([each[:70_001].clone(), each[70_001:].clone()]) for each in (own, theirs)]


def whole(model):
    return torch.cat([model.read(part, torch.empty(CHUNK)) for part in model.chunks()])


def average(model, bits, by="auto"):
    with kernels.using(by):
        return PairwiseAverage(model, 0.5) if bits is None else ModuloAverage(model, Moniqua(bits))


def averaged(bits, asking="auto", asked="auto"):
    """What was said in two questions, of which the second is of codes, and both models."""
    own, theirs = models()
    link = Direct(average(theirs, bits, asked))
    pairs = average(own, bits, asking)
    assert pairs.ask(link, 1)
    for each, seed in ((own, 2), (theirs, 3)):
        each.begin()
        each.end()  # the sums of moves begin at 0 again
        moved = each._parameters[0]
        moved.add_(1e-3 * torch.randn(len(moved), generator=torch.Generator().manual_seed(seed)))
    before = whole(own), whole(theirs)
    assert pairs.ask(link, 1)
    return link.said, own, theirs, before


@pytest.mark.parametrize("bits", ALL)
def test_kernels_and_tensor_operations_say_the_same(bits):
    if kernels.compiler(torch.device("cpu")) is None:
        pytest.skip("numba is not installed")
    found = [averaged(bits, *by) for by in (("auto", "auto"), ("torch", "torch"), ("auto", "torch"), ("torch", "auto"))]
    for said, own, theirs, _ in found[1:]:
        assert [each[:3] for each in said] == [each[:3] for each in found[0][0]]
        assert all(each.body.equal(other.body) for each, other in zip(said, found[0][0], strict=True))
        assert own.moved.equal(found[0][1].moved)
        assert theirs.moved.equal(found[0][2].moved)


@pytest.mark.parametrize("bits", ALL)
@pytest.mark.parametrize("by", ["auto", "torch"])
def test_both_move_by_the_same_float32(bits, by):
    said, own, theirs, before = averaged(bits, by, by)
    assert [each.kind for each in said[2:]] == ([MODEL, CHANGE] if bits is None else [CODES, CELLS])
    assert own.moved.equal(-theirs.moved)
    assert own.moved.any()
    apart = (before[0] - before[1]).abs().max()
    assert (whole(own) - whole(theirs)).abs().max() < 0.5 * apart


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("by", ["auto", "torch"])
def test_an_answer_is_the_differences_of_cells(bits, by):
    """By numbers of float64, without the lattice: what travels, and what both move by."""
    said, own, theirs, (asking, asked) = averaged(bits, by, by)
    question, answer = said[2:]
    step, half = question.number, 2 ** (bits - 1)
    cells = [torch.floor(each.double() * (1 / step)) for each in (asking, asked)]
    codes = unpack_codes(question.body[8:].numpy(), NUMEL, bits)
    assert torch.from_numpy(codes).equal((cells[0] % 2**bits).to(torch.uint8))
    apart = cells[0] - cells[1]
    assert apart.abs().max() < half
    wanted = pack_codes((apart + half).to(torch.uint8).numpy(), bits)
    assert answer.body.numpy().tobytes() == wanted.tobytes()
    assert answer.number == float(apart.abs().max()) * step
    assert theirs.moved.equal(apart.float() * (0.5 * step))
    assert own.moved.equal(-theirs.moved)


@pytest.mark.parametrize("bits", ALL)
def test_chunks_change_nothing(bits, monkeypatch):
    whole = averaged(bits)
    monkeypatch.setattr(shared_model, "CHUNK", 1000)  # of which 73 are left for the last one
    said, own, theirs, _ = averaged(bits)
    assert [each[:3] for each in said] == [each[:3] for each in whole[0]]
    assert all(each.body.equal(other.body) for each, other in zip(said, whole[0], strict=True))
    assert own.moved.equal(whole[1].moved)
    assert theirs.moved.equal(whole[2].moved)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("by", ["auto", "torch"])
@pytest.mark.parametrize("place", [0, CHUNK, NUMEL - 1])
def test_a_wrong_hash_moves_nothing(bits, by, place):
    """One element of any chunk that is too far away."""
    said, _, theirs, _ = averaged(bits, by, by)
    asked = average(theirs, bits, by)
    with theirs.moving(slice(place, place + 1)) as moved:
        moved.add_(1.0)
    before = theirs.moved.clone()
    reply = asked.answer(0, said[2])
    assert (said[2].kind, reply.kind, reply.parts, asked.answered) == (CODES, AGAIN, (), 0)
    assert theirs.moved.equal(before)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_recovered_is_asked_again_in_float32(bits):
    own, theirs = models()
    link, pairs = Direct(average(theirs, bits)), average(own, bits)
    assert pairs.ask(link, 1)
    with theirs.moving(slice(7, 8)) as moved:
        moved.add_(1.0)
    assert pairs.ask(link, 1)
    assert [each.kind for each in link.said] == [MODEL, CHANGE, CODES, AGAIN, MODEL, CHANGE]
    assert pairs.failures == 1
    assert torch.allclose(whole(own), whole(theirs), rtol=0, atol=1e-6)
