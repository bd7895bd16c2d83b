"""A velocity's step by kernels of accelerators has the bits of the tensor operations."""

import pytest
import torch

from lightning_compress.collectives import LocalCollective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Memory
from lightning_compress.core.state import State
from lightning_compress.core.vector import Vector
from lightning_compress.corrections import DGC
from lightning_compress.corrections.correction import zero_where_zero

LAYOUT = Layout.of([("weight", (3, 701)), ("bias", (10,))])
COMPRESSED = [slice(0, 2103)]


def _steps(choice, nesterov, device, by):
    """Gradients and velocities of two steps."""
    by(choice)
    correction = DGC(nesterov=nesterov).correction
    states = {name: State(each.layout, device) for name, each in correction.state(LAYOUT, COMPRESSED).items()}
    world = World(LocalCollective(), device, Meter(device))
    plan = correction.plan(LAYOUT, COMPRESSED, world, states, None)
    found = []
    for number in range(2):
        gradient = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(number)).to(device)
        vector = Vector(Memory(list(gradient.split([2103, 10])), fast=False), number)
        plan.before(vector)
        gradient = vector.whole()
        states["velocity"].touch()
        found += [gradient.cpu().clone(), states["velocity"].pending.cpu().clone()]
        states["velocity"].commit(torch.zeros((), dtype=torch.bool, device=device), LAYOUT.names)
    return found


@pytest.mark.parametrize("nesterov", [False, True])
def test_velocities_are_those_of_tensor_operations(nesterov, device, by):
    expected = _steps("torch", nesterov, torch.device("cpu"), by)
    actual = _steps("triton", nesterov, device, by)
    for one, other in zip(expected, actual, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("numel", [0, 5, 2048, 2100])
def test_a_velocity_is_forgotten_where_everything_was_sent(numel, device, by):
    by("triton")
    source, target = torch.arange(numel, device=device) % 3 - 1.0, torch.full((numel,), 2.0, device=device)
    zero_where_zero(target, source)
    assert target.equal(2.0 * (source != 0))
