"""Means of optimizers' states with neighbours."""

import pytest
import torch
from torch import nn

from lightning_compress.collectives import run_threads
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.states import average_states
from lightning_compress.gossip.topology import build_topology


def momenta(used):
    """Of parameters of one shape, after a mean over 3 ranks; ``used``: each rank's, with gradients of the rank + 1."""

    def run(collective):
        layers = [nn.Parameter(torch.zeros(3)) for _ in used[collective.rank]]
        optimizer = torch.optim.SGD(layers, 0.1, momentum=0.9)
        for layer, uses in zip(layers, used[collective.rank], strict=True):
            layer.grad = torch.full((3,), collective.rank + 1.0) if uses else None
        optimizer.step()
        average_states([optimizer], Neighbours(collective, build_topology("complete", 3)), 0)
        found = [optimizer.state[layer].get("momentum_buffer") for layer in layers]
        return [None if each is None else each.unique().tolist() for each in found]

    return run_threads(3, run)


def test_states_of_other_parameters_are_not_mixed():
    """Experts of one shape, of which each rank has used another; what all have used is averaged."""
    shared, two, rest = [pytest.approx(2.0)], [pytest.approx(1 + (3 - 1) / 3)], [pytest.approx(3 + (1 - 3) / 3)]
    found = momenta([[True, False, True], [False, True, True], [True, False, True]])
    assert found == [[two, None, shared], [None, [2.0], shared], [rest, None, shared]]


def test_optimizers_of_other_numbers_of_parameters_are_left_out():
    assert momenta([[True, True], [True], [True, True]]) == [
        [[pytest.approx(5 / 3)]] * 2,
        [[2.0]],
        [[pytest.approx(7 / 3)]] * 2,
    ]
