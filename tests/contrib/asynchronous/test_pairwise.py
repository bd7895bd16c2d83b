"""Models that are averaged by pairs, by all ranks at once: their mean stays, and they come together."""

import time

import pytest
import torch
from torch import nn

from lightning_compress.collectives import TorchCollective
from lightning_compress.contrib.asynchronous.links import Links
from lightning_compress.contrib.asynchronous.modulo_pairs import EVERY, ModuloAverage
from lightning_compress.contrib.asynchronous.pairwise import Askers, PairwiseAverage
from lightning_compress.contrib.asynchronous.shared_model import SharedModel
from lightning_compress.gossip.moniqua import Moniqua

CPU = torch.device("cpu")
SHAPES = [(101, 37), (), (0,), (5003,)]


def _graph(name, rank, size):
    if name == "ring":
        return sorted({(rank - 1) % size, (rank + 1) % size})
    return [other for other in range(size) if other != rank]


def _whole(parameters):
    return torch.cat([each.detach().reshape(-1) for each in parameters]).double()


def _mean(vector, ranks):
    total = vector.clone()
    ranks.all_reduce(total)
    return total / ranks.size


def _averaged(graph, questions, jump, bits=None):
    """How far the mean is off after all ranks have asked and stepped, and models from it, before and after."""
    ranks = TorchCollective()
    own, common = (torch.Generator().manual_seed(seed) for seed in (1 + ranks.rank, 0))
    parameters = [
        nn.Parameter(torch.randn(shape, generator=common) + 0.1 * torch.randn(shape, generator=own)) for shape in SHAPES
    ]
    before = _whole(parameters)
    mean = _mean(before, ranks)
    model = SharedModel(parameters)
    pairs = PairwiseAverage(model) if bits is None else ModuloAverage(model, Moniqua(bits))
    links = Links(ranks, _graph(graph, ranks.rank, ranks.size), pairs.answer, pairs.kinds, 30.0, CPU)
    asked = []
    askers = Askers(lambda peer: asked.append(pairs.ask(links, peer)), links.peers, ranks.rank)
    stepped = torch.zeros_like(before)
    with torch.no_grad():
        while sum(asked) < questions and askers.error is None:
            askers.step()
            model.begin()
            model.begin()  # a closure that is called twice
            old = _whole(parameters)
            for each in parameters:
                each.add_(1e-4 * torch.randn(each.shape, generator=own))
            if jump and sum(asked) > questions // 2:
                parameters[0].add_(jump)
                jump = 0.0
            stepped += _whole(parameters) - old
            model.end()
            time.sleep(0)  # to the other threads
    askers.pause()
    ranks.all_reduce(torch.zeros(1))  # nobody asks any more
    pairs.pause()
    model.begin()
    model.end()
    after = _whole(parameters)
    drift = float((_mean(after - stepped, ranks) - mean).abs().max())
    apart = [float((vector - _mean(vector, ranks)).abs().max()) for vector in (before, after)]
    links.close()
    askers.close()
    return drift, apart, sum(asked), pairs.answered, repr(askers.error)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(
    ("size", "graph"), [(2, "ring"), (3, "ring"), pytest.param(4, "complete", marks=pytest.mark.thorough)]
)
def test_the_mean_stays_and_models_meet(pools, size, graph, bits):
    found = pools[size].run(_averaged, graph, 200, 5.0, bits)
    for drift, (before, after), asked, _, error in found:
        assert error == "None"
        assert asked >= 200
        assert drift <= 1e-5
        assert after < before
    assert sum(each[2] for each in found) == sum(each[3] for each in found)


def _spiked():
    """The theta of 200 questions of rank 0, whose model is far off at the 70th."""
    ranks, noise, found = TorchCollective(), torch.Generator().manual_seed(0), []
    parameters = [torch.zeros(1000)]
    model = SharedModel(parameters)
    pairs = ModuloAverage(model, Moniqua(8))
    links = Links(ranks, [1 - ranks.rank], pairs.answer, pairs.kinds, 30.0, CPU)
    for number in range(200 if ranks.rank == 0 else 0):
        model.begin()
        parameters[0].add_(torch.randn(1000, generator=noise) * (1e4 if number == 70 else 1))
        model.end()
        assert pairs.ask(links, 1)
        found.append(pairs._theta[1])
    ranks.all_reduce(torch.zeros(1))
    links.close()
    return found


def test_theta_is_measured_anew_after_a_spike(pools):
    thetas, _ = pools[2].run(_spiked)
    assert max(thetas) > 1e3 * max(thetas[:70])
    assert max(thetas[3 * EVERY :]) < 2 * max(thetas[:70])


def _paused():
    ranks = TorchCollective()
    parameters = [torch.full((7,), float(ranks.rank))]
    model = SharedModel(parameters)
    pairs = PairwiseAverage(model)
    links = Links(ranks, [1 - ranks.rank], pairs.answer, pairs.kinds, 30.0, CPU)
    found = []
    if ranks.rank == 1:
        pairs.pause()
    for _ in range(2):
        ranks.all_reduce(torch.zeros(1))
        if ranks.rank == 0:
            found.append(pairs.ask(links, 1))
        ranks.all_reduce(torch.zeros(1))
        pairs.resume()
    seen = parameters[0].tolist()  # as a forward pass sees them, until the next step
    model.begin()
    model.end()
    links.close()
    return found, seen, parameters[0].tolist()


def test_a_rank_that_is_paused_is_not_moved(pools):
    (asked, seen, met), (_, others, mean) = pools[2].run(_paused)
    assert asked == [False, True]
    assert (seen, others) == ([0.0] * 7, [1.0] * 7)
    assert met == mean == [0.5] * 7


def _another_model():
    ranks = TorchCollective()
    pairs = PairwiseAverage(SharedModel([torch.zeros(7 - ranks.rank)]))
    links = Links(ranks, [1 - ranks.rank], pairs.answer, {**pairs.kinds, **dict.fromkeys(pairs.kinds, 28)}, 30.0, CPU)
    try:
        if ranks.rank == 0:
            pairs.ask(links, 1)
        while ranks.rank:
            links.check()
            time.sleep(0.01)
    except RuntimeError as error:
        links.close(error)
        return str(error)
    return ""


def test_another_model_is_an_error(pools):
    said = "rank 1 failed: ValueError: rank 0 sent a model of 7 parameters, and this one has 6"
    assert all(each.startswith(said) for each in pools[2].run(_another_model))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bits": 2}, "use 4 or 8 bits, or an algorithm whose ranks wait"),
        ({"rounding": "dither"}, "use rounding='nearest' or leave it out"),
        ({"theta": 2.0}, "leave both out"),
    ],
    ids=str,
)
def test_settings_that_need_equal_steps_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ModuloAverage(SharedModel([]), Moniqua(**settings))
