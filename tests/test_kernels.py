"""Kernels do what tensor operations do, bit by bit; and what was chosen is the same on all ranks."""

import numpy as np
import pytest
import torch

from lightning_compress import kernels
from lightning_compress.codecs import CODECS
from lightning_compress.feedback import add_gradients, copy_gradients
from lightning_compress.layout import Layout
from lightning_compress.state import State

CPU = torch.device("cpu")
LAYOUT = Layout.of([("weight", (300, 1900)), ("bias", (37,))])  # more than a piece, and a rest
METHODS = [
    {"name": "onebit"},
    {"name": "onebit", "block": 96},
    {"name": "efsign"},
    {"name": "rotated"},
    {"name": "rotated", "bits": 5},
    {"name": "rotated", "block": 64},
    {"name": "topk", "density": 0.02},
    {"name": "topk", "density": 0.02, "selection": "sampled"},
]


@pytest.fixture
def both(monkeypatch):
    """Run something with kernels and without."""
    if kernels.of(CPU) is None:
        pytest.skip("numba is not installed")

    def run(program):
        fast = program()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "of", lambda device: None)
            return fast, program()

    return run


def _messages(given):
    settings = dict(given)
    plan = CODECS[settings.pop("name")](**settings).plan(LAYOUT, CPU)
    sent, left = [], []
    for rank in range(3):
        vector = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(rank)) ** 3
        vector[1000:3000] = -0.0 if rank else 1e-30
        message = torch.zeros(plan.message_size, dtype=torch.uint8)
        plan.send(vector.clone(), message, 7 + rank)
        again = message.clone()
        plan.encode(vector, message, 7 + rank)
        assert message.equal(again)
        sent.append(message)
        left.append(vector)
    return plan, torch.stack(sent), left


@pytest.mark.parametrize("given", METHODS, ids=str)
def test_same_messages_and_same_rest(given, both):
    (_, fast, left), (_, slow, wanted) = both(lambda: _messages(given))
    assert fast.equal(slow)
    for one, other in zip(left, wanted, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("given", METHODS, ids=str)
def test_same_sums(given, accumulate, both):
    def program():
        plan, messages, _ = _messages(given)
        out = torch.ones(LAYOUT.numel)
        plan.decode(messages, out, 1 / 3, accumulate)
        return out

    fast, slow = both(program)
    torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-6 * float(slow.abs().max()))


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan, 0.0])
def test_adding_gradients(bad, both):
    def program():
        generator = torch.Generator().manual_seed(1)
        state = State(LAYOUT, CPU)
        state.committed.copy_(torch.randn(LAYOUT.numel, generator=generator))
        gradients = [torch.randn(each.numel, generator=generator) for each in LAYOUT.segments]
        if bad is not None:
            gradients[1][3 if bad else slice(None)] = bad
        return add_gradients(gradients, state, 1.0), state.pending, torch.cat(gradients) + state.committed

    (sound, pending, wanted), (same, _, _) = both(program)
    assert sound == same == (bad is None)
    if sound:
        assert pending.equal(wanted)


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_copying_gradients(bad):
    if kernels.of(CPU) is None:
        pytest.skip("numba is not installed")
    gradients = [torch.randn(numel) for numel in (1000, 0, 37)]
    if bad is not None:
        gradients[0][3] = bad
    out = torch.full((1037,), 7.0)
    assert copy_gradients(gradients, out) == (bad is None)
    assert bad is not None or out.equal(torch.cat(gradients))
    assert not copy_gradients([each.half() for each in gradients], out)


def test_random_bits_of_a_tile_are_those_of_the_stream(both):
    """A key whose state wraps around, and a piece that does not begin at 0."""
    given = {"name": "rotated", "bits": 8}
    (_, fast, _), (_, slow, _) = both(lambda: _messages(given))
    assert np.array_equal(fast.numpy(), slow.numpy())
