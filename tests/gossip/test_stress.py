"""2,000 rounds of every algorithm with every codec that it admits: ranks stay as near each other as in float32."""

import re

import numpy as np
import pytest
import torch

from lightning_compress.codecs import CODECS, QSGD, Dense, EFSign, Rotated, TopK
from lightning_compress.collectives import run_threads
from lightning_compress.contrib.codecs.natural import Natural
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.contrib.codecs.threshold import Threshold
from lightning_compress.contrib.codecs.wangni import Wangni
from lightning_compress.core.layout import Layout
from lightning_compress.gossip import ALGORITHMS
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.noise import carried, largest_step
from lightning_compress.gossip.topology import build_topology

NUMEL, ROUNDS, RATE, SPREAD = 500, 2000, 0.05, 0.1
LAYOUT = Layout.of([("weight", (NUMEL,))])
TIMES = 3.0


def slope(model, centre, generator):
    """Of a quadratic around another centre on each rank, with noise."""
    return model - centre + SPREAD * torch.randn(model.shape, generator=generator)


def distances(models):
    return (models - models.mean(0)).square().mean((0, -1)).sqrt().tolist()


def compressed(algorithm, compressor, graph):
    """The root mean square distance of the ranks from their mean in rounds 250, 500, ..., and the step in use."""

    def rank(collective):
        generator = torch.Generator().manual_seed(collective.rank)
        vector, centre = torch.zeros(NUMEL), 1 + SPREAD * torch.randn(NUMEL, generator=generator)
        mixing = algorithm.begin(vector.clone(), Neighbours(collective, graph), compressor, LAYOUT, 0)
        models = []
        for number in range(ROUNDS):
            vector -= RATE * slope(vector, centre, generator)
            mixing.mix(vector, RATE)
            if number % 250 == 249:
                models.append(vector.clone())
        return torch.stack(models), mixing.steps

    ranks = run_threads(graph.size, rank, timeout=600.0)
    step = max(ranks[0][1].values(), default=getattr(compressor, "share", 1.0))
    return distances(torch.stack([models for models, _ in ranks])), step


def exact(name, share, graph):
    """The same in float32, by the papers' formulas: with the same step towards the neighbours."""
    size, generator = graph.size, torch.Generator().manual_seed(99)
    centres = 1 + SPREAD * torch.randn(size, NUMEL, generator=generator)
    weights = torch.eye(size) + share * torch.from_numpy(graph.matrices[0] - np.eye(size)).float()
    models, moved, kept = torch.zeros(size, NUMEL), torch.zeros(size, NUMEL), []
    for number in range(ROUNDS):
        step = RATE * slope(models, centres, generator)
        if name in ("dcd", "ecd"):  # a step follows the mean
            models = weights @ models - step
        else:
            before = models - step + moved
            models = weights @ before
        if name == "d2":
            moved += models - before
        if number % 250 == 249:
            kept.append(models)
    return distances(torch.stack(kept, 1))


def takes(algorithm, compressor):
    """Whether the algorithm admits it, when it is constructed."""
    try:
        algorithm.check_compressor(compressor)
    except ValueError:
        return False
    return True


CANDIDATES = [
    *(make() for make in CODECS.complete().values()),
    *(TopK(0.1), RandomK(0.1), Threshold(0.01, 0.01, capacity=1.0), QSGD(8), QSGD(2), Rotated(8), Rotated(2)),
    *(Moniqua(1), Moniqua(2), Moniqua(1, "nearest"), Moniqua(2, "nearest"), Moniqua(4), Moniqua(8)),
]
PAIRS = [(name, each) for name in ALGORITHMS.complete() for each in CANDIDATES if takes(build_algorithm(name), each)]
CHEAP = [
    *(("dpsgd", Moniqua(1)), ("d2", Moniqua(4)), ("choco", TopK())),
    *(("deepsqueeze", TopK()), ("dcd", Rotated()), ("ecd", Rotated(8))),
]

REFUSED = [
    *((name, each) for name in ("dcd", "ecd") for each in (Wangni(), QSGD(2))),
    *(("ecd", each) for each in (TernGrad(), Natural(), QSGD(), Rotated(), Rotated(2))),
    ("ecd", CODECS.complete()["qsgd_elias"]()),
    *((name, each) for name in ("choco", "deepsqueeze") for each in (Threshold(), Threshold(0.01, 0.01, capacity=1.0))),
]


@pytest.mark.timeout(1800)  # DCT's takes long
@pytest.mark.parametrize(
    ("name", "compressor", "size"),
    [
        pytest.param(name, each, size, marks=() if size == 4 and (name, each) in CHEAP else pytest.mark.thorough)
        for name, each in PAIRS
        for size in ((4, 8) if (name, each) in CHEAP else (4,))
    ],
    ids=str,
)
def test_ranks_stay_as_near_as_in_float32_or_it_is_refused(name, compressor, size):
    """Three times the distance at most, with the same step towards the neighbours, however many rounds."""
    algorithm = build_algorithm(name)
    graph = algorithm.fit_topology(build_topology("ring", size), None)
    try:
        algorithm.check_noise(compressor, LAYOUT, graph)
        found, step = compressed(algorithm, compressor, graph)
    except ValueError as refusal:
        assert (name, compressor) in REFUSED
        assert re.search("would diverge with|ranks would not agree with", str(refusal))  # noqa: PT017
        return
    assert (name, compressor) not in REFUSED
    assert max(found[3:]) < TIMES * exact(name, step, graph)[-1]


@pytest.mark.parametrize("bits", [1, 2])
def test_d2_needs_4_bits(bits):
    """At 2 bits ranks are further apart than without talking, at 1 bit there is no end."""
    for rounding in ("nearest", "dither"):
        with pytest.raises(ValueError, match=rf"d2 would diverge with moniqua at bits={bits}: .* Take bits=4 or 8"):
            build_gossip_compressor({"name": "moniqua", "bits": bits, "rounding": rounding}, build_algorithm("d2"))


CARRY = [(Dense(), 1.0), (RandomK(0.1), 0.1), (RandomK(0.01), 0.01), (TopK(0.01), 0.063), (EFSign(), 0.63)]


@pytest.mark.parametrize(("codec", "share"), CARRY, ids=str)
def test_what_messages_carry(codec, share):
    """Of random elements, just their share; the figure is the same on a part of a large model."""
    assert carried(codec, Layout.of([("w", (100, 100))])) == pytest.approx(share, rel=0.05)
    large = Layout.of([("w", (1500, 1000)), ("b", (10,))])
    assert carried(codec, large) == pytest.approx(share, rel=0.05)


def test_the_largest_step_is_that_of_random_elements():
    """Mean squares of a pair (model, what is known of it) in the mode that breaks first: they grow above it."""
    for share, graph in ((0.1, build_topology("ring", 8)), (0.5, build_topology("star", 5))):
        for factor, grows in ((0.9, False), (1.1, True)):
            move = factor * largest_step(share, graph) * (1 - graph.least)
            sent, kept = np.array([[1 - move, 0], [1, 0]]), np.array([[1, -move], [0, 1]])
            squares = share * np.kron(sent, sent) + (1 - share) * np.kron(kept, kept)
            assert (np.abs(np.linalg.eigvals(squares)).max() > 1) == grows


def steps_of(algorithm, compressor):
    made = build_algorithm(algorithm)
    coding, graph = build_gossip_compressor(compressor, made), build_topology("ring", 4)

    def rank(collective):
        try:
            return made.begin(torch.zeros(NUMEL), Neighbours(collective, graph), coding, LAYOUT, 0).steps
        except ValueError as refusal:
            return str(refusal)

    return run_threads(4, rank)


@pytest.mark.parametrize(
    ("name", "setting", "part", "most"), [("choco", "gamma", 0.6, 0.4), ("deepsqueeze", "eta", 0.1, 0.1)]
)
def test_a_step_follows_from_the_codec(name, setting, part, most):
    """By default; the user's own is a warning where it may diverge, and an error on every rank where it would."""
    bound = largest_step(carried(TopK(), LAYOUT), build_topology("ring", 4))
    assert bound == pytest.approx(0.048, abs=0.002)
    assert steps_of(name, "topk") == [{setting: pytest.approx(part * bound)}] * 4
    signs = largest_step(carried(EFSign(), LAYOUT), build_topology("ring", 4))
    assert steps_of(name, "efsign") == [{setting: pytest.approx(min(most, part * signs))}] * 4
    assert steps_of(name, "none") == [{setting: pytest.approx(most)}] * 4
    assert steps_of({"name": name, setting: 0.04}, "topk") == [{setting: 0.04}] * 4
    with pytest.warns(UserWarning, match=f"{setting}=0.1 may diverge with TopK.* 0.048.* Leave it out") as caught:
        assert steps_of({"name": name, setting: 0.1}, "topk") == [{setting: 0.1}] * 4
    assert len(caught) == 1
    for said in steps_of({"name": name, setting: 0.4}, "topk"):
        assert re.search(f"{setting}=0.4 would diverge with TopK.* carry 6.* on topology ring of 4 ranks 0.048", said)
