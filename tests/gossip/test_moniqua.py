"""Moniqua: what is recovered, what is detected, and what is refused."""

import copy

import numpy as np
import pytest
import torch

from lightning_compress import kernels
from lightning_compress.collectives import run_threads
from lightning_compress.core.layout import Layout
from lightning_compress.gossip import modulo
from lightning_compress.gossip.lattice import Blocks, Lattice, relative_error
from lightning_compress.gossip.modulo import BLOCK, CHUNK, Modulo, ModuloMessages, cut
from lightning_compress.gossip.moniqua import ByRate, ByRound, Estimated, Moniqua, read_theta
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import build_topology
from tests.gossip.helpers import RATE, Problem, models_of, run
from tests.reference import gossip as reference

CPU = torch.device("cpu")
LEGAL = [
    Moniqua(bits, rounding, theta=1.0)
    for bits in (1, 2, 4, 8)
    for rounding in ("nearest", "dither", "stochastic")
    if (bits, rounding) != (1, "stochastic")
]
BOTH = ["auto", "torch"]
NUMEL = CHUNK + 77
FLAT = Layout.of([("a", (100,)), ("b", (NUMEL - 100,))])
BLOCKS = cut(FLAT)
BOUNDS = torch.linspace(1.0, 1.5, len(BLOCKS), dtype=torch.float64)
AGREE = Estimated().every


def averaging_of(settings, collective, graph, numel=9, seed=0):
    return Modulo(settings, Neighbours(collective, graph), Layout.of([("x", (numel,))]), CPU, seed)


@pytest.fixture(params=BOTH)
def by(request):
    with kernels.using(request.param):
        yield request.param


def pair(theta, numel, seed=0, scale=100.0):
    """Two models, no parameter of which differs by theta, at magnitudes around ``scale``."""
    generator = np.random.default_rng(seed)
    one = (generator.standard_normal(numel) * scale).astype(np.float32)
    other = (one + (generator.random(numel) * 2 - 1) * theta * 0.9999).astype(np.float32)
    other[np.abs(other.astype(np.float64) - one) >= theta] = one[np.abs(other.astype(np.float64) - one) >= theta]
    return torch.from_numpy(one), torch.from_numpy(other)


def whole(settings, numel, theta=1.0):
    """One block."""
    return Blocks(torch.tensor([numel]), settings.step(torch.full((1,), theta, dtype=torch.float64)))


def draws_of(settings, numel):
    if settings.way == "nearest":
        return None
    return torch.from_numpy(np.random.default_rng(5).integers(-(2**15), 2**15, numel).astype(np.int16))


@pytest.mark.parametrize("settings", LEGAL, ids=str)
def test_lemma(settings):
    """Of any number less than theta away, what is recovered is off by delta B at most, and is the sender's own."""
    theta, numel = 1.0, 200_000
    own, theirs = pair(theta, numel)
    blocks, draws = whole(settings, numel, theta), draws_of(settings, numel)
    step = float(blocks.steps)
    lattice = Lattice(settings.bits, settings.way, CPU)
    codes = torch.zeros(numel * settings.bits // 8, dtype=torch.uint8)
    with kernels.using("torch"):
        slow = Lattice(settings.bits, settings.way, CPU)
    lattice.encode(theirs, blocks, draws, 0, codes)
    found = slow.recover(own.double() / step, draws, codes)
    sent = torch.floor(theirs.double() / step + slow._shift(draws)).long()
    assert found.equal(sent)
    recovered = (found.double() + slow._offset(draws)) * step
    bound = settings.delta * 2 * theta / (1 - 2 * settings.delta)
    error = (recovered - theirs.double()).abs().max()
    assert 0.99 * bound < error <= bound * (1 + 1e-9)


@pytest.mark.parametrize("settings", [each for each in LEGAL if each.way != "nearest"], ids=str)
def test_random_rounding_is_right_on_average(settings):
    x, blocks, total = torch.full((1,), 0.3217), whole(settings, 1), 0.0
    step = float(blocks.steps)
    lattice = Lattice(settings.bits, settings.way, CPU)
    every = range(-(2**15), 2**15, 64)
    for draw in every:
        draws = torch.tensor([draw], dtype=torch.int16)
        codes = torch.zeros(1, dtype=torch.uint8)
        lattice.encode(x, blocks, draws, 0, codes)
        with kernels.using("torch"):
            slow = Lattice(settings.bits, settings.way, CPU)
        total += float(slow.recover(x.double() / step, draws, codes) + slow._offset(draws)) * step / len(every)
    assert total == pytest.approx(0.3217, abs=step / 500)


def message_of(settings, x, key=9, by="auto"):
    with kernels.using(by):
        messages = ModuloMessages(settings, FLAT, CPU)
    messages.key, messages.steps = key, settings.step(BOUNDS)
    return messages, messages.write(x)


@pytest.mark.parametrize("settings", LEGAL, ids=str)
def test_kernels_write_what_tensor_operations_write(settings):
    if kernels.compiler(CPU) is None:
        pytest.skip("numba is not installed")
    own, theirs = pair(1.0, NUMEL, scale=3.0)
    own[5], own[6], own[7] = np.inf, np.nan, -1e30
    theirs[10:90] += 7.0  # not recovered
    moved = []
    for by in BOTH:
        messages, mine = message_of(settings, own, by=by)
        mine = mine.clone()
        _, other = message_of(settings, theirs, by=by)
        wrong = messages.wrong(own, {2: other, 4: mine})
        x, sums = own.clone(), torch.full_like(own, 0.01)
        last = len(BLOCKS) - 1
        messages.move(x, {2: other, 4: mine}, {2: 0.3, 4: 0.25}, 0.5, {(4, last): x[BLOCKS[last]] + 1}, sums)
        moved.append((mine, other, wrong[2], wrong[4], x, sums))
    for fast, slow in zip(*moved, strict=True):
        assert fast.numpy().tobytes() == slow.numpy().tobytes()
    assert moved[0][2].nonzero().tolist() == [[0]]


@pytest.mark.parametrize("settings", LEGAL, ids=str)
def test_codes_and_hashes_do_not_depend_on_what_is_encoded_together(settings):
    """Blocks that are empty, of a few elements, and longer than what the kernel packs at a time."""
    sizes = [0, 3, 1500, 0, 0, 1, 7, 2100, 0]
    numel = sum(sizes)
    x, draws = torch.from_numpy(np.random.default_rng(3).standard_normal(numel)).float(), draws_of(settings, numel)
    x[1503], x[numel - 1] = np.nan, np.inf
    steps = torch.linspace(0.01, 0.5, len(sizes), dtype=torch.float64)
    found = []
    for by in BOTH:
        with kernels.using(by):
            lattice = Lattice(settings.bits, settings.way, CPU)
        packed = torch.full((-(-numel * settings.bits // 8),), 255, dtype=torch.uint8)
        hashes = lattice.encode(x, Blocks(torch.tensor(sizes), steps), draws, 5, packed)
        found.append((hashes.tolist(), packed.tolist()))
        start = 3 + 1500 + 1 + 7
        some, rest = (
            torch.empty(-(-2100 * settings.bits // 8), dtype=torch.uint8),
            None if draws is None else draws[start:],
        )
        alone = lattice.encode(x[start:], Blocks.single(2100, float(steps[7]), CPU), rest, 5 + start, some)
        assert int(alone) == hashes[7]
    assert found[0] == found[1]
    assert [number for number, each in enumerate(found[0][0]) if each == 0] == [0, 3, 4, 8]


@pytest.mark.parametrize("settings", LEGAL, ids=str)
def test_every_injected_overflow_is_detected(settings, by):
    """A parameter of the other that is further away than the interval allows, one at a time, anywhere."""
    generator, (own, theirs) = np.random.default_rng(1), pair(1.0, NUMEL, scale=2.0)
    widths = settings.step(BOUNDS) * 2**settings.bits
    for place in generator.integers(NUMEL, size=25):
        jumped = theirs.clone()
        block = next(number for number, each in enumerate(BLOCKS) if each.start <= place < each.stop)
        jumped[place] += float(generator.choice([-1, 1]) * widths[block] * generator.integers(1, 4))
        messages, _ = message_of(settings, own, by=by)
        wrong = messages.wrong(own, {1: message_of(settings, jumped, by=by)[1]})[1]
        assert wrong.nonzero().tolist() == [[block]]
    assert not messages.wrong(own, {1: message_of(settings, theirs, by=by)[1]})[1].any()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rounds_are_those_of_the_paper(bits):
    """In real numbers: modulo as the paper writes it, without integers, while nobody is theta away."""
    size, theta = 4, 1.0
    generator = np.random.default_rng(2)
    models = [(5 + 0.2 * generator.standard_normal(301)).astype(np.float32) for _ in range(size)]
    settings, graph = Moniqua(bits, "nearest", theta=theta, slack=0.5), build_topology("ring", size)
    weights = np.eye(size) + 0.5 * (graph.matrices[0] - np.eye(size))
    wanted = reference.moniqua_round(
        [each.astype(np.float64) for each in models], weights, bits, float(whole(settings, 1).steps) * 2**bits
    )

    def rank(collective):
        averaging, x = (
            averaging_of(settings, collective, graph, 301),
            torch.from_numpy(models[collective.rank].copy()),
        )
        averaging.average(x, 0.1)
        assert averaging.numbers["failures"] == 0
        return x.numpy()

    for mine, theirs in zip(run_threads(size, rank), wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)


@pytest.mark.parametrize("algorithm", ["dpsgd", "d2"])
def test_fine_codes_train_as_exact_ones(algorithm):
    exact = models_of(run(algorithm, None, 8, rounds=60))
    coded = models_of(run(algorithm, {"name": "moniqua", "bits": 8, "theta": 1.5}, 8, rounds=60))
    assert np.abs(coded - exact).max() < 0.1
    assert np.abs(coded.mean(1) - exact.mean(1))[-1].max() < 0.01


@pytest.mark.parametrize("theta", [0.05, {"rate": 3.0}])
@pytest.mark.parametrize(("algorithm", "bits"), [("dpsgd", 1), ("dpsgd", 4), ("d2", 4)])
def test_where_theta_is_too_small_the_mean_still_holds(bits, theta, algorithm):
    """Edges that fail are mixed exactly, both ways; theta grows for all, at the same round."""
    size, problem, rounds = 4, Problem(4), AGREE  # by later rounds it may have shrunk to what was given
    ranks = run(algorithm, {"name": "moniqua", "bits": bits, "theta": theta}, size, rounds=rounds, problem=problem)
    numbers = [each.mixing.numbers for each in ranks]
    assert sum(each["failures"] for each in numbers) > 0
    growths = [each.mixing.vectors["growth"].tolist() for each in ranks]
    assert all(each == growths[0] for each in growths)
    assert max(growths[0]) > 1
    assert sum(each.mixing.figures()["resent_bytes"] for each in ranks) > 0
    models = models_of(ranks).astype(np.float64)
    before = np.concatenate([np.tile(problem.start, (1, size, 1)), models[:-1]])
    slopes = np.stack([problem.gradient(rank, before[:, rank]) for rank in range(size)], axis=1)
    assert np.abs(models.mean(1) - (before.mean(1) - 0.1 * slopes.mean(1))).max() < 1e-5


def test_without_a_hash_nobody_learns_of_it():
    problem = Problem(4)
    problem.centres *= 3
    ranks = run("dpsgd", {"name": "moniqua", "theta": 0.05, "verify": False}, 4, rounds=30, problem=problem)
    models = models_of(ranks)[-1]
    assert np.abs(models.mean(0) - problem.optimum).max() > 0.1
    assert ranks[0].mixing.numbers["checked"] == 0


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_traffic_is_two_neighbours_times_bits(bits, size):
    """And 9 bytes a neighbour and block for the hash and the answer."""
    numel, rounds = 2 * CHUNK + 800, 3
    blocks = -(-numel // BLOCK)
    layout = Layout.of([("weight", (numel,))])
    ranks = run("dpsgd", {"name": "moniqua", "bits": bits, "theta": 9.0}, size, rounds=rounds, layout=layout)
    for rank, each in enumerate(ranks):
        peers = {(rank + 1) % size, (rank - 1) % size}
        assert set(each.neighbours.sent) == peers
        padding = -(numel * bits // 8) % 16
        assert each.neighbours.bytes_sent == rounds * 2 * (numel * bits // 8 + padding + 9 * blocks)
        assert each.mixing.figures()["hash_bytes"] == rounds * 2 * 9 * blocks
    bare = run("dpsgd", {"name": "moniqua", "bits": bits, "theta": 9.0, "verify": False}, size, rounds=1, layout=layout)
    assert bare[0].neighbours.bytes_sent == 2 * numel * bits // 8


def test_the_toy_needs_slack_at_one_bit():
    """Codes of one bit: with slack all ranks come to the optimum, without it they part, and the mean with them."""
    found = {}
    for slack in (0.1, 1.0):
        settings = {"name": "moniqua", "bits": 1, "rounding": "dither", "theta": 1.0, "slack": slack, "verify": False}
        problem = Problem(8)
        problem.centres = problem.centres * 0.1 + problem.centres[0]
        models = models_of(run("dpsgd", settings, 8, rounds=600, rate=0.01, problem=problem))[-1]
        found[slack] = np.abs(models.mean(0) - problem.optimum).max(), np.abs(models - models.mean(0)).max()
    assert found[0.1][0] < 0.05
    assert found[0.1][1] < 1.0
    assert found[1.0][0] > 1.0


def test_one_outlier_does_not_coarsen_theta():
    """One parameter of one rank is far off once: the block is sent as float32 until it is back."""
    size = 4

    def rank(collective):
        averaging = averaging_of(Moniqua(theta=1.0), collective, build_topology("ring", size))
        x, thetas = torch.zeros(9), []
        for number in range(100 * AGREE):
            x[0] += 1000.0 * (number == 50 and collective.rank == 1)
            averaging.mix(x, 0.1)
            thetas.append(averaging.figures()["theta"])
        return thetas, averaging.numbers["failures"]

    assert [(set(thetas), failures > 0) for thetas, failures in run_threads(size, rank)] == [({1.0}, True)] * size


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_a_measuring_round_averages_in_full(bits):
    """The whole model is there: slack is for codes."""
    exact = models_of(run("dpsgd", None, 4, rounds=1))
    assert np.array_equal(models_of(run("dpsgd", {"name": "moniqua", "bits": bits}, 4, rounds=1)), exact)


@pytest.mark.parametrize("bits", [1, 2])
def test_what_is_sent_whole_is_averaged_in_full(bits):
    """As in a round in which no block is recovered."""
    exact = models_of(run("dpsgd", None, 4, rounds=1))
    coded = run("dpsgd", {"name": "moniqua", "bits": bits, "theta": 1e-6}, 4, rounds=1)
    assert all(each.mixing.numbers["failures"] == each.mixing.numbers["checked"] > 0 for each in coded)
    np.testing.assert_allclose(models_of(coded), exact, atol=1e-6)


class Noisy(Problem):
    """The same minimum on all ranks, and noise of a scale for each tensor."""

    def __init__(self, layout, scales=(1.0,), size=8):
        super().__init__(size, numel=layout.numel)
        tensors = zip(layout.segments, scales, strict=True)
        self.scale = np.concatenate([np.full(each.numel, scale) for each, scale in tensors])
        self.noise = [np.random.default_rng(rank) for rank in range(size)]
        self.centres = np.zeros_like(self.centres)

    def gradient(self, rank, model):
        noise = self.noise[rank].standard_normal(len(model)) * self.scale
        return (0.1 * model + noise).astype(np.float32)


@pytest.mark.parametrize(("bits", "times"), [(1, 6.0), (2, 3.0), (4, 1.2)])
def test_noise_keeps_ranks_within_some_times_the_distance_of_exact_means(bits, times):
    """Of a code's noise, theta over the usual difference decides: theta must follow, and slack fit it."""
    layout = Layout.of([("weight", (500,))])

    def apart(compressor):
        models = models_of(run("dpsgd", compressor, 8, rounds=200, rate=0.05, problem=Noisy(layout), layout=layout))
        return np.sqrt(np.square(models - models.mean(1, keepdims=True))[100:].mean())

    assert apart({"name": "moniqua", "bits": bits}) < times * apart(None)


class Spiky(Noisy):
    """With gradients that are 1e4 times too large: ``spikes`` are their ranks, by round."""

    def __init__(self, spikes, size):
        super().__init__(ONE, size=size)
        self.rounds, self.spikes = [0] * size, spikes

    def gradient(self, rank, model):
        spike = rank in self.spikes.get(self.rounds[rank], ())
        self.rounds[rank] += 1
        return super().gradient(rank, model) * np.float32(1e4 if spike else 1)


ONE = Layout.of([("weight", (500,))])
SPIKES = [
    ("dpsgd", 2, {40: [1]}),
    ("dpsgd", 3, {40: [0, 2]}),
    ("dpsgd", 4, {40: [1]}),
    ("dpsgd", 4, {40: [1], 46: [2]}),
    ("dpsgd", 8, {40: [0, 1, 4]}),
    ("d2", 4, {40: [1]}),
]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("algorithm", "size", "spikes"), SPIKES)
def test_ranks_come_together_after_a_spike_as_soon_as_with_exact_means(algorithm, size, spikes, bits):
    """Theta must not keep the size of the spike, for noise grows with it."""

    def apart(compressor):
        ranks = run(algorithm, compressor, size, rounds=81, rate=0.05, problem=Spiky(spikes, size), layout=ONE)
        models = models_of(ranks)
        by_round = np.sqrt(np.square(models - models.mean(1, keepdims=True)).mean((1, 2)))
        return by_round[20:40].mean(), by_round[max(spikes) + 20 :].mean()

    before, after = apart({"name": "moniqua", "bits": bits})
    assert after < 2 * max(before, apart(None)[1])


@pytest.mark.parametrize("size", [2, 3])
def test_theta_follows_a_jump_that_lasts(size):
    """And then nothing need be sent again."""

    def rank(collective):
        averaging = averaging_of(Moniqua(bits=4), collective, build_topology("ring", size), 500)
        x, noise, thetas = torch.zeros(500), torch.Generator().manual_seed(collective.rank), []
        for number in range(100):
            x += torch.randn(500, generator=noise) * (1 if number < 40 else 1e4)
            averaging.mix(x, 0.1)
            thetas.append(averaging.figures()["theta"])
        return thetas

    thetas = run_threads(size, rank)
    assert all(each == thetas[0] for each in thetas)
    assert min(thetas[0][70:]) > 3e3 * thetas[0][39]


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_without_a_spike_theta_is_followed_as_if_there_were_none(bits, monkeypatch):
    """No more bytes: not a bit differs, in 200 rounds of normal noise."""

    def found():
        noisy = Noisy(THREE, SCALES, 3)
        ranks = run("dpsgd", {"name": "moniqua", "bits": bits}, 3, rounds=200, rate=0.05, problem=noisy, layout=THREE)
        return models_of(ranks)[-1].tobytes(), [each.neighbours.bytes_sent for each in ranks]

    waiting = found()
    monkeypatch.setattr(modulo, "JUMP", np.inf)
    assert found() == waiting


@pytest.mark.parametrize("size", [2, 3])
def test_a_run_that_is_resumed_amid_a_spike_goes_on_bit_for_bit(size):
    def rank(collective, resumed):
        averaging = averaging_of(Moniqua(bits=4), collective, build_topology("ring", size), 500)
        x, noise = torch.zeros(500), torch.Generator().manual_seed(collective.rank)
        for number in range(70):
            if number == 45 and resumed:
                state = copy.deepcopy(averaging.state_dict())
                averaging = averaging_of(Moniqua(bits=4), collective, build_topology("ring", size), 500)
                averaging.load_state_dict(state)
            if number == 45:
                waits = float(averaging.vectors["seen"])
            x += torch.randn(500, generator=noise) * (1e4 if number == 43 and collective.rank == 1 else 1)
            averaging.mix(x, 0.1)
        return waits, x.numpy().tobytes(), averaging.neighbours.bytes_sent

    through, resumed = (run_threads(size, lambda ranks, on=on: rank(ranks, on)) for on in (False, True))
    assert [each[1] for each in through] == [each[1] for each in resumed]
    assert all(waits > 1e3 for waits, *_ in resumed)


SCALES = (1.0, 0.01, 0.0)
THREE = Layout.of([("first", (BLOCK + 999,)), ("second", (2001,)), ("third", (1000,))])


@pytest.mark.parametrize("topology", ["ring", "one_peer"])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_theta_is_of_each_tensor_and_follows_the_differences(bits, topology):
    """Also where rounds have other edges; little is sent again, though the learning rate falls to a tenth."""
    rate, rounds = lambda number: 0.1 if number < 60 else 0.01, 120
    moniqua = {"name": "moniqua", "bits": bits}
    ranks = run("dpsgd", moniqua, 8, topology, rounds, rate, Noisy(THREE, SCALES), layout=THREE)
    owner = [next(k for k, each in enumerate(THREE.segments) if place.start < each.end) for place in cut(THREE)]
    growths = [each.mixing.vectors["growth"].numpy() for each in ranks]
    assert all(np.array_equal(each, growths[0]) for each in growths)
    thetas = [growths[0][np.array(owner) == tensor].max() for tensor in range(3)]
    assert thetas[1] == pytest.approx(0.01 * thetas[0], rel=0.5)
    assert thetas[2] <= 1e-5 * thetas[0]
    models = models_of(ranks)
    peers = [build_topology(topology, 8).weights(rank, rounds - 1) for rank in range(8)]
    apart = max(np.abs(models[-1, rank] - models[-1, peer]).max() for rank in range(8) for peer in peers[rank])
    assert apart < 6 * thetas[0]
    resent = sum(each.mixing.figures()["resent_bytes"] for each in ranks)
    assert resent < 0.1 * rounds * 4 * THREE.numel * sum(map(len, peers))


@pytest.mark.parametrize("size", [4, 8])
def test_each_edge_of_a_changing_graph_is_measured(size):
    """Each rank's difference from one other alone is large, and nothing need be sent again."""
    graph = build_topology("one_peer", size)

    def rank(collective):
        averaging = averaging_of(Moniqua(bits=8), collective, graph)
        seen = []
        for _ in range(2 * len(graph.matrices)):
            x = torch.full((9,), float(collective.rank))  # partners differ by 1, 2, 4, ... in turn
            averaging.mix(x, 0.1)
            seen.append(float(averaging.vectors["growth"]))
        return seen[len(graph.matrices) - 1], averaging.numbers["failures"]

    assert run_threads(size, rank) == [(pytest.approx(3.0 * size / 2), 0.0)] * size


@pytest.mark.parametrize("bits", [1, 8])
def test_a_rank_without_neighbours_in_a_round_waits_for_nobody(bits):
    """Pairs of three ranks in turn; the mean of the models is that of exact means."""
    pairs = [[[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], [[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]]]
    problem = Problem(3)
    problem.curvatures[:] = 1.0
    coded = models_of(run("dpsgd", {"name": "moniqua", "bits": bits}, 3, pairs, problem=problem))
    exact = models_of(run("dpsgd", None, 3, pairs, problem=problem))
    np.testing.assert_allclose(coded.mean(1), exact.mean(1), atol=1e-5)


def test_few_bits_are_dithered_unless_told_otherwise():
    assert [Moniqua(bits).way for bits in (1, 2, 4, 8)] == ["dither", "dither", "nearest", "nearest"]
    assert Moniqua(1, "nearest").way == "nearest"


def test_what_is_too_far_out_for_the_lattice_is_detected(by):
    """Its cells would all be the last one, which neighbours would recover without a difference."""

    def rank(collective):
        averaging = averaging_of(Moniqua(theta=1e-15), collective, build_topology("ring", 3))
        x = torch.full((9,), 1.0 + collective.rank)
        averaging.average(x, 0.1)
        return float(x[0]), averaging.numbers["failures"], float(averaging.vectors["worst"])

    assert run_threads(3, rank) == [(2.0, 2.0, pytest.approx(apart * 1e15)) for apart in (2, 1, 2)]


def test_nothing_of_a_measurement_is_kept():
    """Whole vectors of neighbours are not memory of the method."""
    kept = run("dpsgd", "moniqua", 3, rounds=20)[0].neighbours._memory
    assert {key[1] for key in kept} == {torch.uint8}


@pytest.mark.parametrize("before", ["estimated", 0.01])
def test_another_theta_counts_when_a_run_goes_on(before):
    problem = Problem(3)
    states = [
        each.mixing.state_dict() for each in run("dpsgd", {"name": "moniqua", "theta": before}, 3, problem=problem)
    ]

    def rank(collective):
        averaging = averaging_of(Moniqua(theta=5.0), collective, build_topology("ring", 3))
        averaging.load_state_dict(states[collective.rank] | {"vectors": averaging.vectors})
        averaging.vectors["growth"].fill_(7.0)
        averaging.average(torch.zeros(9), 0.1)
        return averaging.figures()["theta"]

    assert run_threads(3, rank) == [5.0] * 3


THETAS = [
    (2.0, ByRound((0,), (2.0,))),
    (2, ByRound((0,), (2.0,))),
    ({"rounds": {"10": 0.5, 0: 2.0}}, ByRound((0, 10), (2.0, 0.5))),
    ({"rate": 20}, ByRate(20.0)),
    ("estimated", Estimated()),
    ({"estimated": 3.0, "every": 10}, Estimated(3.0, 10)),
]


@pytest.mark.parametrize(("given", "wanted"), THETAS)
def test_thetas(given, wanted):
    assert read_theta(given) == wanted


def test_thetas_over_time():
    made = read_theta({"rounds": {0: 2.0, 10: 0.5}})
    assert [made.at(number, 0.1) for number in (0, 9, 10, 99)] == [2.0, 2.0, 0.5, 0.5]
    assert read_theta({"rate": 20}).at(3, 0.1) == pytest.approx(2.0)


BAD = [
    ({"bits": 3}, "bits=3 must be one of 1, 2, 4, 8"),
    ({"bits": True}, "bits=True"),
    ({"bits": 1, "rounding": "stochastic"}, r"delta=0.5, and it must be below 1/2; take rounding='nearest'"),
    ({"rounding": "up"}, "must be one of nearest, dither, stochastic, or null"),
    ({"theta": 0}, "above 0, not 0"),
    ({"theta": -1.0}, "above 0, not -1.0"),
    ({"theta": float("inf")}, "above 0"),
    ({"theta": "big"}, "theta='big': give a bound"),
    ({"theta": {"rounds": {5: 1.0}}}, "first bound is of round 5"),
    ({"theta": {"rounds": {0: 1.0, 5: 0}}}, "above 0, not 0"),
    ({"theta": {"rounds": {"soon": 1.0}}}, "'soon' is no round"),
    ({"theta": {"rate": 0}}, "the factor of the learning rate must be a number above 0"),
    ({"theta": {"estimated": 1.0}}, "must be above 1"),
    ({"theta": {"estimated": 2.0, "every": 0}}, "a number of rounds"),
    ({"slack": 0.0}, r"slack=0.0 must be in \(0, 1\]"),
    ({"slack": 1.5}, "slack=1.5"),
    ({"verify": "yes"}, "true or false"),
    ({"verify": False}, "theta='estimated' follows what the hashes tell, and verify=False sends none"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=str)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Moniqua(**settings)


def test_every_legal_delta_is_below_a_half():
    assert all(each.delta < 0.5 for each in LEGAL)
    assert relative_error(1, "stochastic") == 0.5


def test_learning_rates_that_differ_are_an_error_on_every_rank():
    errors = []

    def rank(collective):
        averaging = averaging_of(Moniqua(theta={"rate": 10.0}), collective, build_topology("ring", 3))
        with pytest.raises(ValueError, match="learning rates differ"):
            averaging.average(torch.zeros(9), 0.1 + 0.1 * (collective.rank == 2))
        errors.append(collective.rank)

    run_threads(3, rank)
    assert sorted(errors) == [0, 1, 2]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("algorithm", ["dpsgd", "d2"])
def test_theta_by_a_learning_rate_that_begins_and_ends_at_0(algorithm, verify):
    """As linear and cosine schedules with a warm-up do: theta is that of the last rate above 0."""
    size, problem, last = 4, Problem(4), 19
    moniqua = {"name": "moniqua", "theta": {"rate": 40.0}, "verify": verify}
    rates = lambda number: RATE * min(max(0, number - 1) / 4, (last - number) / 5)  # noqa: E731
    ranks = run(algorithm, moniqua, size, rate=rates, rounds=last + 1, problem=problem)
    assert [each.mixing.figures()["theta"] for each in ranks] == [pytest.approx(40.0 * rates(last - 1))] * size
    assert all(each.mixing.numbers["failures"] == 0 for each in ranks)
    exact = models_of(run(algorithm, None, size, rate=rates, rounds=last + 1, problem=problem))
    models = models_of(ranks)
    assert np.array_equal(models[1, 0], problem.start)
    assert np.abs(models - exact).max() < 0.1
