"""Push-sum: directed graphs, weights, delays, and what is refused."""

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from lightning_compress.codecs import EFSign
from lightning_compress.collectives import run_threads
from lightning_compress.gossip import ALGORITHMS
from lightning_compress.gossip.algorithm import GRID
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import build_topology
from tests.gossip.helpers import LAYOUT, NUMEL, RATE, Problem, models_of, run
from tests.reference import gossip as reference

SIZES, DELAYS = [3, 4, 8], [0, 1, 2]


def sgp(delay):
    return {"name": "sgp", "delay": delay}


def uneven(size, rounds=1, seed=0):
    """Directed matrices whose rows do not sum to 1: a ring, and other edges by chance; each rank divides evenly."""
    generator, matrices = np.random.default_rng(seed), []
    for _ in range(rounds):
        edges = np.eye(size) + np.roll(np.eye(size), 1, 0) + (generator.random((size, size)) < 0.4)
        matrices.append((edges > 0) / (edges > 0).sum(0))
    return np.array(matrices)


GRAPHS = {
    "ring": lambda size: "ring",
    "directed ring": lambda size: "directed_ring",
    "one peer": lambda size: "one_peer_exponential",
    "uneven": lambda size: uneven(size)[0],
    "uneven, by turns": lambda size: uneven(size, 3),
    "never both ways": lambda size: _alternating(size),
}


def _alternating(size):
    """In a round, only some ranks send; some receive from several, and others from none."""
    even, odd = np.eye(size), np.eye(size)
    for rank in range(size):
        matrix = odd if rank % 2 else even
        matrix[rank, rank], matrix[(rank + 1) % size, rank] = 0.25, 0.75
        even[0, size - 1], even[size - 1, size - 1] = 0.5, 0.5
        odd[:, size - 1] = np.eye(size)[size - 1]
    return np.array([even, odd])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("delay", DELAYS)
def test_it_follows_the_paper(delay, graph, size):
    problem, topology = Problem(size), GRAPHS[graph](size)
    matrices = build_topology(topology, size).matrices
    given = problem.start, size, 20, np.float32(RATE), problem.gradient
    wanted = np.stack(list(reference.sgp(*given, lambda number: matrices[number % len(matrices)], delay)))
    found = models_of(run(sgp(delay), None, size, topology))
    np.testing.assert_allclose(found, wanted, atol=5e-6 * np.abs(wanted).max())


def totals(size, topology, delay, rounds=25):
    """After each round: the sum of the weights, and of numerators; what the steps changed; the smallest weight."""
    problem, algorithm = Problem(size), build_algorithm(sgp(delay))
    graph = algorithm.fit_topology(build_topology(topology, size), None)

    def rank(collective):
        vector, moved = torch.from_numpy(problem.start.copy()), torch.zeros(NUMEL, dtype=torch.float64)
        mixing = algorithm.begin(vector.clone(), Neighbours(collective, graph), None, LAYOUT, 0)
        rows = []
        for _ in range(rounds):
            before = vector.double()
            vector -= RATE * torch.from_numpy(problem.gradient(collective.rank, vector.numpy()))
            moved += vector.double() - before
            mixing.mix(vector, RATE)
            held, weight = mixing.surplus()
            rows.append((weight, mixing.numbers["weight"], vector.double() + held.double(), moved.clone()))
        return rows

    return problem, list(zip(*run_threads(size, rank), strict=True))


@pytest.mark.parametrize("size", [*SIZES, 5])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("delay", DELAYS)
def test_nothing_is_lost(delay, graph, size):
    """Weights sum to the number of ranks after each round, and numerators to the start and all steps."""
    problem, rounds = totals(size, GRAPHS[graph](size), delay)
    start = size * torch.from_numpy(problem.start).double()
    for ranks in rounds:
        assert sum(weight for weight, *_ in ranks) == pytest.approx(size, abs=1e-12)
        assert min(weight for _, weight, *_ in ranks) > 0
        off = sum(held for *_, held, _ in ranks) - start - sum(moved for *_, moved in ranks)
        assert off.abs().max() < 2e-5


def test_weights_differ_where_ranks_receive_more_than_others():
    _, rounds = totals(4, uneven(4)[0], 0)
    weights = [weight for _, weight, *_ in rounds[-1]]
    assert max(weights) > 1.2 * min(weights)
    assert all(weight == 1 for ranks in totals(8, "directed_ring", 0)[1] for _, weight, *_ in ranks)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("graph", ["one peer", "uneven", "uneven, by turns"])
def test_ranks_agree_on_the_mean_of_where_they_began(graph, delay):
    """Without steps: push-sum's own promise, also where plain averaging would end on another mean."""
    size, algorithm = 5, build_algorithm(sgp(delay))
    topology = algorithm.fit_topology(build_topology(GRAPHS[graph](size), size), None)

    def rank(collective):
        vector = torch.full((NUMEL,), 0.0)
        mixing = algorithm.begin(vector.clone(), Neighbours(collective, topology), None, LAYOUT, 0)
        vector += collective.rank + 1  # the first step
        for _ in range(120):
            mixing.mix(vector, RATE)
        return vector

    for vector in run_threads(size, rank):
        torch.testing.assert_close(vector, torch.full_like(vector, 3.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_peer_is_exact_after_as_many_rounds_as_an_index_has_bits(size):
    graph, bits = build_topology("one_peer_exponential", size), size.bit_length() - 1
    product = np.linalg.multi_dot([np.eye(size), np.eye(size), *graph.matrices])
    assert len(graph.matrices) == bits
    np.testing.assert_allclose(product, np.full((size, size), 1 / size))
    assert [len(graph.targets(rank, number)) for rank in range(size) for number in range(bits)] == [1] * size * bits


@pytest.mark.parametrize("graph", ["uneven", "one peer"])
@pytest.mark.parametrize("delay", DELAYS)
def test_a_saved_state_goes_on_bit_for_bit(delay, graph):
    """Also with messages in flight, and when they are saved as they travel."""
    size, problem, algorithm = 4, Problem(4), build_algorithm(sgp(delay))
    topology = GRAPHS[graph](size)
    whole, half = (run(sgp(delay), None, size, topology, rounds=rounds) for rounds in (14, 7))
    mixed = algorithm.fit_topology(build_topology(topology, size), None)

    def rank(collective):
        saved = half[collective.rank].mixing.state_dict()
        travelling = [each for name, each in saved["vectors"].items() if name.startswith("arriving")]
        assert len(travelling) == delay
        assert all(each.abs().max() > 0 for each in travelling)
        vector = torch.from_numpy(half[collective.rank].models[-1].copy())
        mixing = algorithm.begin(torch.zeros(NUMEL), Neighbours(collective, mixed), None, LAYOUT, seed=3)
        mixing.load_state_dict(saved)
        for number in range(7):
            vector -= np.float32(RATE) * torch.from_numpy(problem.gradient(collective.rank, vector.numpy()))
            mixing.mix(vector, RATE)
            if number == 3:
                mixing.state_dict()  # a save changes nothing
        return vector.numpy()

    for mine, wanted in zip(run_threads(size, rank), whole, strict=True):
        assert np.array_equal(mine, wanted.models[-1])


def test_a_state_of_another_delay_is_refused():
    one, two = (run(sgp(delay), None, 2, rounds=3)[0].mixing for delay in (1, 2))
    with pytest.raises(ValueError, match="saved with other settings"):
        two.load_state_dict(one.state_dict())
    assert build_algorithm(sgp(1)).title != build_algorithm(sgp(2)).title  # so the strategy does not try


@pytest.mark.parametrize("delay", DELAYS)
def test_memory_is_what_is_said(delay):
    """Numerator, and of each round in flight what is sent and what is received; weights aside."""
    mixing = run(sgp(delay), None, 3, "directed_ring", rounds=4)[0].mixing
    packets = [mixing._own, *mixing._sent, *(each for slot in mixing._received[:delay] for each in slot)]
    assert sum(each.values.nbytes for each in packets) == build_algorithm(sgp(delay)).memory * NUMEL


def test_without_dividing_by_the_weight_a_delay_is_wrong():
    """What a rank holds is no model while a part of it is under way."""
    size, problem = 4, Problem(4)
    ranks = run(sgp(1), None, size, "one_peer_exponential", rounds=200)
    pushed = np.mean([each.mixing.vectors["numerator"].numpy() for each in ranks], axis=0)
    assert np.abs(models_of(ranks)[-1].mean(0) - problem.optimum).max() < 0.2
    assert np.abs(pushed - problem.optimum).max() > 0.5


@pytest.mark.parametrize("delay", DELAYS)
def test_messages_that_cannot_arrive_are_dropped_with_their_weight(delay):
    """After an abort: the quotient stays a model, and the mean divides by the weights that are left."""
    size, algorithm = 2, build_algorithm(sgp(delay))
    graph = algorithm.fit_topology(build_topology("directed_ring", size), None)

    def rank(collective):
        mixing = algorithm.begin(torch.ones(NUMEL), Neighbours(collective, graph), None, LAYOUT, 0)
        for _ in range(5):
            mixing.mix(torch.ones(NUMEL), RATE)

        def fails():
            raise RuntimeError("connection closed by peer")

        mixing._travels = {slot: (fails, shares) for slot, (_, shares) in mixing._travels.items()}
        with pytest.raises(RuntimeError, match="closed") if delay else nullcontext():
            mixing.land()
        mixing.abandon()
        held, weight = mixing.surplus()
        return 1 + held, weight

    for total, weight in run_threads(size, rank):
        assert (weight < 1) == bool(delay)
        torch.testing.assert_close(total / weight, torch.ones(NUMEL))


def test_shares_are_exact_in_float32():
    graph = build_algorithm("sgp").fit_topology(build_topology("ring", 3), None)
    for matrix in graph.matrices:
        assert np.array_equal(matrix / GRID, np.round(matrix / GRID))
        assert np.array_equal(matrix.sum(0), np.ones(3))


@pytest.mark.parametrize("delay", [-1, 0.5, "1", True, None])
def test_refused_delays(delay):
    with pytest.raises(
        ValueError, match=rf"sgp: delay={re.escape(repr(delay))} must be an integer, 0 or more.* Take 1"
    ):
        build_algorithm(sgp(delay))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS.complete() if name != "sgp"])
def test_a_delay_is_a_setting_of_no_other_algorithm(name):
    with pytest.raises(ValueError, match=f"algorithm '{name}' has no setting 'delay'; it has: "):
        build_algorithm({"name": name, "delay": 1})


@pytest.mark.parametrize("compressor", ["moniqua", "efsign", "topk", "qsgd", "fp16", EFSign(), Moniqua(8)])
def test_refused_compressors(compressor):
    with pytest.raises(ValueError, match=r"algorithm sgp pushes models .* Use compressor='none'; for fewer bytes"):
        build_gossip_compressor(compressor, build_algorithm("sgp"))


@pytest.mark.parametrize("compressor", ["auto", "none", None])
def test_models_go_as_they_are(compressor):
    assert build_gossip_compressor(compressor, build_algorithm("sgp")) is None


@pytest.mark.parametrize("name", [name for name in ALGORITHMS.complete() if name != "sgp"])
@pytest.mark.parametrize("graph", ["directed_ring", "one_peer_exponential", "uneven"])
def test_others_need_symmetric_graphs(name, graph):
    topology = build_topology(GRAPHS[graph](4) if graph in GRAPHS else graph, 4)
    with pytest.raises(ValueError, match=rf"For algorithm {name} it must be symmetric, .* Use algorithm sgp, which"):
        build_algorithm(name).fit_topology(topology, None)


def test_a_rank_that_keeps_nothing():
    """It is made lazy as D2's is; who forbids it hears why."""
    swaps, algorithm = [[0, 0, 1], [1, 0, 0], [0, 1, 0]], build_algorithm("sgp")
    assert algorithm.fit_topology(build_topology(swaps, 3), None).name == "lazy matrix"
    with pytest.raises(ValueError, match=r"rank 0 gives away all of its model .* 'lazy': True"):
        algorithm.fit_topology(build_topology(swaps, 3), False)
