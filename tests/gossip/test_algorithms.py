"""Every algorithm does what its paper says."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from lightning_compress.codecs import CODECS, QSGD, EFSign, TopK
from lightning_compress.collectives import run_threads
from lightning_compress.contrib.codecs.atomo import ATOMO
from lightning_compress.contrib.codecs.natural import Natural
from lightning_compress.contrib.codecs.wangni import Wangni
from lightning_compress.contrib.gossip.replicating import bearable, noise_of, unbiased
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.gossip import ALGORITHMS
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.dpsgd import DPSGD
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import build_topology
from tests.gossip.helpers import LAYOUT, NUMEL, RATE, Problem, models_of, run
from tests.reference import codecs
from tests.reference import gossip as reference

SIZES = [3, 4, 8]
MONIQUA = {"name": "moniqua", "bits": 8, "theta": 3.0}
METHODS = [
    ("dpsgd", None),
    ("dpsgd", MONIQUA),
    ("dpsgd", {"name": "moniqua", "bits": 1}),
    ("d2", None),
    ("d2", MONIQUA),
    ("choco", TopK(0.3)),
    ("dcd", Natural()),
    ("ecd", {"name": "qsgd", "bits": 8, "bucket": 64}),
    ("deepsqueeze", EFSign(64)),
]


def slow(algorithm, size, rounds=20, topology="ring", **more):
    problem, made = Problem(size), build_algorithm(algorithm)
    graph = made.fit_topology(build_topology(topology, size), None)
    matrices = [each.astype(np.float32) for each in graph.matrices]
    given = problem.start, size, rounds, np.float32(RATE), problem.gradient
    return np.stack(
        list(getattr(reference, algorithm)(*given, lambda number: matrices[number % len(matrices)], **more))
    )


def close(ranks, wanted, tolerance=2e-5):
    np.testing.assert_allclose(models_of(ranks), wanted, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("topology", ["ring", "star", "exponential"])
@pytest.mark.parametrize("algorithm", ["dpsgd", "d2"])
def test_exact_means_follow_the_paper(algorithm, topology, size):
    close(run(algorithm, None, size, topology), slow(algorithm, size, topology=topology))


@pytest.mark.parametrize("size", [4, 8])
def test_neighbours_that_change(size):
    close(run("dpsgd", None, size, "one_peer"), slow("dpsgd", size, topology="one_peer"))


@pytest.mark.parametrize("size", SIZES)
def test_on_the_complete_graph_dpsgd_is_sgd_of_mean_gradients(size):
    problem = Problem(size)
    wanted = np.stack(list(reference.all_reduce(problem.start, size, 20, np.float32(RATE), problem.gradient)))
    close(run("dpsgd", None, size, "complete"), wanted)


@pytest.mark.parametrize("size", SIZES)
def test_choco_follows_the_paper(size):
    def topk(vector, rank, number):
        return codecs.topk(vector, 0.3, [(each.offset, each.end) for each in LAYOUT.segments])[0]

    close(
        run({"name": "choco", "gamma": 0.5}, TopK(0.3), size),
        slow("choco", size, compress=topk, gamma=np.float32(0.5)),
    )


@pytest.mark.parametrize("size", SIZES)
def test_deepsqueeze_follows_the_paper(size):
    def signs(vector, rank, number):
        return codecs.efsign(vector, 64)[0]

    close(
        run({"name": "deepsqueeze", "eta": 0.3}, EFSign(64), size),
        slow("deepsqueeze", size, compress=signs, eta=np.float32(0.3)),
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ["dcd", "ecd"])
def test_dcd_and_ecd_follow_the_paper(algorithm, size):
    def natural(vector, rank, number):
        return codecs.natural(vector.astype(np.float32), Natural().bucket, key=mix(3, number, rank + 1))[0]

    close(run(algorithm, Natural(), size), slow(algorithm, size, compress=natural))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_mean_is_that_of_the_local_steps(method, size):
    """What edges move one way, they move back the other; DCD and ECD put their codecs' noise into it."""
    ranks, problem = run(*method, size), Problem(size)
    models = models_of(ranks).astype(np.float64)
    before = np.concatenate([np.tile(problem.start, (1, size, 1)), models[:-1]])
    slopes = np.stack([problem.gradient(rank, before[:, rank]) for rank in range(size)], axis=1)
    off = models.mean(1) - (before.mean(1) - RATE * slopes.mean(1))
    noisy = method[0] in ("dcd", "ecd")
    assert np.abs(off).max() < (0.5 if noisy else 1e-6)
    assert np.abs(off).max() > 1e-6 or not noisy


@pytest.mark.parametrize(
    ("name", "compressor", "size"),
    [
        *((name, "none", 3) for name in ALGORITHMS.complete()),
        ("d2", MONIQUA, 3),
        ("ecd", "none", 6),
    ],  # weights of 1/3 and of 1/6
)
def test_rounding_does_not_add_up_in_the_mean(name, compressor, size):
    """Off by the square root of the rounds, as sums are, with models near 1 whose parameters move by 0.001 a round."""
    made, rounds, layout = build_algorithm(name), 300, Layout.of([("weight", (64,))])
    coding, graph = build_gossip_compressor(compressor, made), made.fit_topology(build_topology("star", size), None)

    def rank(collective):
        vector, moved = torch.ones(64), torch.zeros(64, dtype=torch.float64)
        mixing = made.begin(vector.clone(), Neighbours(collective, graph), coding, layout, seed=3)
        generator = torch.Generator().manual_seed(collective.rank)
        for _ in range(rounds):
            before = vector.double()
            vector += 1e-3 * (torch.randn(64, generator=generator) + torch.linspace(-1, 1, 64))
            moved += vector.double() - before
            mixing.mix(vector, RATE)
        return vector.double() - 1 - moved

    off = sum(run_threads(size, rank)) / size
    assert off.square().mean().sqrt() < 1.5e-6


def test_d2_beats_dpsgd_where_data_differ():
    """With a constant rate D-PSGD stays off the optimum by what the ranks' data differ; D2 does not."""
    problem = Problem(8)
    apart = {
        name: np.abs(models_of(run(name, None, 8, rounds=400))[-1] - problem.optimum).max() for name in ("dpsgd", "d2")
    }
    assert apart["d2"] < 1e-4
    assert apart["dpsgd"] > 0.1


@pytest.mark.parametrize("topology", ["ring", "complete"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_saved_state_goes_on_bit_for_bit(method, topology):
    """State is what is saved, and nothing else: half a run, a new object, the other half."""
    size, problem, made = 3, Problem(3), build_algorithm(method[0])
    whole = run(*method, size, topology, rounds=14)
    half = run(*method, size, topology, rounds=7)
    coding = build_gossip_compressor(method[1], made)

    def rank(collective):
        graph = made.fit_topology(build_topology(topology, size), None)
        vector = torch.from_numpy(half[collective.rank].models[-1].copy())
        mixing = made.begin(torch.zeros(NUMEL), Neighbours(collective, graph), coding, LAYOUT, seed=3)
        mixing.load_state_dict(half[collective.rank].mixing.state_dict())
        for _ in range(7):
            vector -= np.float32(RATE) * torch.from_numpy(problem.gradient(collective.rank, vector.numpy()))
            mixing.mix(vector, RATE)
        return vector.numpy()

    for mine, wanted in zip(run_threads(size, rank), whole, strict=True):
        assert np.array_equal(mine, wanted.models[-1])


@pytest.mark.parametrize("name", ALGORITHMS.complete())
def test_memory_is_what_is_said(name):
    mixing = run(name, "auto", 3, rounds=1)[0].mixing
    assert sum(4 * each.numel() for each in mixing.vectors.values()) == ALGORITHMS[name].memory * NUMEL


def test_a_state_of_something_else_is_refused():
    choco, dcd = (run(name, "auto", 2, rounds=1)[0].mixing for name in ("choco", "dcd"))
    with pytest.raises(ValueError, match="saved with other settings"):
        dcd.load_state_dict(choco.state_dict())
    wrong = choco.state_dict()
    wrong["vectors"]["known"] = torch.zeros(7)
    with pytest.raises(ValueError, match="7 numbers, and there are 301"):
        choco.load_state_dict(wrong)


@pytest.mark.parametrize("compressor", ["wangni", "topk", "randomk"])
def test_messages_of_any_length(compressor):
    """Also those that differ in length, and those whose elements all ranks draw alike."""
    algorithm = "dcd" if compressor == "wangni" else "choco"
    ranks = run(algorithm, {"name": compressor, "density": 0.5}, 4, rounds=30)
    assert np.isfinite(models_of(ranks)).all()
    apart = sum(each.mixing.vectors["apart"].double() for each in ranks)
    torch.testing.assert_close(apart, torch.zeros_like(apart), atol=1e-4, rtol=0)  # all have the same replicas of each
    assert all(each.neighbours.bytes_sent > 0 for each in ranks)


UNBIASED = [
    *(each() for each in CODECS.complete().values() if unbiased(each())),
    ATOMO(6),
    Wangni(0.5),
    QSGD(2),
    QSGD(8),
]
DIVERGE = [ATOMO(), Wangni(), QSGD(2)]


@pytest.mark.parametrize("codec", UNBIASED, ids=str)
def test_noise_that_replicas_cannot_bear_is_refused_and_other_noise_dies_out(codec):
    """By the variance on normal numbers and the graph's eigenvalues."""
    graph = build_topology("ring", 4)
    assert bearable(graph) == pytest.approx(4 / 3)
    refused = noise_of(codec, LAYOUT) >= bearable(graph)
    assert refused == (codec in DIVERGE)
    models = models_of(run("dcd", codec, 4, rounds=40))
    apart = np.abs(models - models.mean(1, keepdims=True)).max((1, 2))
    assert (apart[-1] > 3) == refused
    for name, most in (("dcd", bearable(graph)), ("ecd", 0.01)):
        with (
            pytest.raises(ValueError, match=f"would diverge with .* bears less than {most:.3g} ")
            if noise_of(codec, LAYOUT) >= most
            else nullcontext()
        ):
            build_algorithm(name).check_noise(codec, LAYOUT, graph)


def test_one_rank_bears_any_noise():
    assert bearable(build_topology("complete", 1)) == np.inf
    assert bearable(build_topology("complete", 2)) == pytest.approx(2.0)


def test_divergence_is_no_reason_to_hang():
    problem = Problem(3)
    problem.start[5] = np.nan
    for method in METHODS:
        assert np.isnan(models_of(run(*method, 3, rounds=3, problem=problem))[-1]).any()


def test_an_algorithm_from_outside_is_called_by_its_class_unless_it_says_otherwise():
    class Slow(DPSGD):
        pass

    class Named(DPSGD):
        name = "mine"

    assert (Slow.name, Named.name, DPSGD.name) == ("slow", "mine", "dpsgd")
