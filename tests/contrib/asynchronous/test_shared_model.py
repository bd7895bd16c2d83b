"""A shared model: any part of it is its parameters and what they were moved by, however these lie in memory."""

import threading

import pytest
import torch

from lightning_compress.contrib.asynchronous import shared_model
from lightning_compress.contrib.asynchronous.shared_model import SharedModel


def parameters():
    """Some that are no more than a chunk of 64, some of several chunks, and some that are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (), (0,), (7, 31), (5, 0), (6, 4, 3, 3), (40,), (2, 300)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[3] = made[3].t()
    made[5] = made[5].to(memory_format=torch.channels_last)
    made[6] = torch.randn(120, generator=generator)[::3]
    return [*made, torch.randn(129, generator=generator).bfloat16(), torch.randn(5, generator=generator).double()]


def whole(each):
    return torch.cat([part.reshape(-1).float() for part in each])


@pytest.fixture(params=[8, 64, 1 << 16])
def chunk(request, monkeypatch):
    monkeypatch.setattr(shared_model, "CHUNK", request.param)
    return request.param


def test_chunks_are_the_model(chunk):
    own = parameters()
    model, room = SharedModel(own), torch.empty(chunk)
    before, change = whole(own), torch.randn(model.numel, generator=torch.Generator().manual_seed(1))
    for part in model.chunks():
        with model.moving(part) as moved:
            moved.add_(change[part])
    assert whole(own).equal(before)  # until the optimizer steps
    found = torch.cat([model.read(part, room).clone() for part in model.chunks()])
    assert torch.allclose(found, before + change, rtol=0, atol=1e-6)
    for _ in range(2):  # the second time there is nothing to add
        model.begin()
        model.end()
        after = whole(own)
        assert torch.allclose(after, before + change, rtol=2**-8, atol=1e-6)
        read = torch.cat([model.read(part, room).clone() for part in model.chunks()])
        assert read.equal(after)


def test_a_model_of_nothing():
    model = SharedModel([])
    assert (model.numel, list(model.chunks())) == (0, [])


def test_training_goes_between_two_chunks(chunk):
    """A neighbour's thread that is between chunks does not keep the optimizer waiting, and waits for it."""
    model, room = SharedModel([torch.zeros(3 * chunk)]), torch.empty(chunk)
    first, second, _ = model.chunks()
    with model.moving(first) as moved:
        moved.add_(1.0)
    model.begin()
    reader = threading.Thread(target=model.read, args=(second, room), daemon=True)
    reader.start()
    reader.join(0.1)
    assert reader.is_alive()
    model.end()
    reader.join(30)
    assert not reader.is_alive()
    assert model.read(first, room).eq(1.0).all()
    assert not model.moved.any()
