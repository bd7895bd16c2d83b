"""The laws of the house, over every method, exchange and world size, on ranks that are threads."""

import inspect
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from lightning_compress.codecs import CODECS, FFT, QSGD, Codec, Dense, Rotated
from lightning_compress.collectives import LocalCollective, TorchCollective, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.atomo import ATOMO
from lightning_compress.contrib.codecs.natural import Natural
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.contrib.exchanges.chain import Chain
from lightning_compress.core.source import Source
from lightning_compress.exchanges import EXCHANGES, AllGather, Hierarchical, Pattern
from lightning_compress.planning import link as probe
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import Link
from lightning_compress.reducers import REDUCERS
from lightning_compress.settings.compensation import automatic
from lightning_compress.testing import thread_ranks
from lightning_compress.testing.vectors import CPU, DENSE, LARGE, SMALL, make
from tests.cases import CASES, unbiased_cases
from tests.turns import TURN, by_turns, pairwise

SPARSE = ["recursive_doubling", "butterfly", "run_length"]
"""Exchanges of sums, for methods that send few elements; the last takes any, of which these are enough."""
EXTREMES = (1e-35, 1e-30, 1e-20, 1.0, 1e20, 1e30)
"""Scales of gradients, from where squares underflow to where they overflow."""
DROPPING = ["ok_topk"]
"""Those of them that drop the smaller sums."""
TREES = {
    "binomial": ("none", "bf16", "topk", "threshold", "onebit", "randomk", "fft"),
    "chain": ("none", "topk_rice", "onebit"),
}
"""Exchanges that encode sums again and again, whatever the method: of each kind of message these are enough."""
SIZES = [1, 2, 3, 4, 5]
CORE = tuple(EXCHANGES)
"""Exchanges that are tried with every method, whenever; others, as other methods are, once each, but thoroughly."""
PATTERNS = {name: kind() for name, kind in EXCHANGES.complete().items()}
PATTERNS |= {"hierarchical": Hierarchical(node_size=2), "chain": Chain("binomial", 2)}


def group_plan(method, exchange, collective, meter, dense=DENSE, large=LARGE):
    """The plan of a group as the rules make it, by an exchange or its name: a dense stretch, then the method's."""
    return thread_ranks.make_plan(method, pattern(exchange), collective, meter, dense, large)[0]


def pattern(exchange):
    return exchange if isinstance(exchange, Pattern) else PATTERNS[exchange]


def can_travel(case, exchange, size=2):
    if not isinstance(case.codec, Codec):
        return exchange == "auto"
    if exchange in TREES:
        return case.name in TREES[exchange]
    if exchange == "hierarchical":
        return size % 2 == 0
    if exchange == "split_gather":
        return case.codec.sparse
    if exchange in SPARSE:
        return case.codec.sparse or isinstance(case.codec, Dense | RandomK)
    if exchange in DROPPING:
        return (
            case.codec.contractive and (case.codec.sparse or isinstance(case.codec, RandomK))
        ) or case.name == "none"
    if exchange == "two_shot":
        return case.codec.reencodable
    return exchange != "all_reduce" or case.codec.sum_dtype is not None


def average(codec, exchange, size, flag_rank=None):
    """One mean on every rank."""
    return thread_ranks.average_on_ranks(codec, pattern(exchange), size, flag_rank)


def over_sockets(codec, exchanges):
    """A mean by each exchange on a rank of a pool."""
    return [thread_ranks.average(TorchCollective(), codec, pattern(exchange)) for exchange in exchanges]


@cache
def outcome(codec, exchange, size):
    """Of a mean that several laws look at."""
    return thread_ranks.outcome_of(average(codec, exchange, size))


@cache
def promised(codec, exchange, size):
    """Bytes that rank 0 sends, by the formula: a plan knows them."""
    return run_threads(size, lambda ranks: group_plan(codec, exchange, ranks, Meter(CPU)).cost.bytes_sent)[0]


def grid():
    """Every method by every exchange at every size. Not thorough: a pairwise cover, and little of contrib, by turns."""
    every = [
        (case, exchange, size)
        for case in CASES
        for exchange in PATTERNS
        for size in SIZES
        if can_travel(case, exchange, size)
    ]
    taken = pairwise([(case.name, *where) for case, *where in every if not case.contrib and where[0] in CORE])
    for number, case in enumerate(each for each in CASES if each.contrib):
        own = [each for each in every if each[0] is case and each[1] in CORE and each[2] > 1]
        taken.add((case.name, *own[(number + TURN) % len(own)][1:]))
    for exchange in (each for each in PATTERNS if each not in CORE):
        for size in SIZES:
            own = [case.name for case in CASES if not case.contrib and can_travel(case, exchange, size)]
            if own:
                taken.add((own[(size + TURN) % len(own)], exchange, size))
    return [
        pytest.param(
            *(case, exchange, size),
            id=f"{case.name}-{exchange}-{size}",
            marks=() if (case.name, exchange, size) in taken else pytest.mark.thorough,
        )
        for case, exchange, size in every
    ]


GRID = grid()


@pytest.mark.parametrize(("case", "exchange", "size"), GRID)
def test_mass_is_conserved_and_all_ranks_agree(case, exchange, size):
    check_conservation(outcome(case.codec, exchange, size), case, exchange, size)


def check_conservation(result, case, exchange, size):
    assert result.agree
    assert result.finite
    assert result.error <= tolerance(case, exchange, size) or not case.codec.conserves


@pytest.mark.parametrize(("case", "size"), by_turns(CASES, (2, 3), 1))
def test_the_same_over_sockets(pools, case, size):
    exchanges = [exchange for exchange in PATTERNS if can_travel(case, exchange, size)]
    answers = pools[size].run(over_sockets, case.codec, exchanges)
    for number, exchange in enumerate(exchanges):
        ranks = [answer[number] for answer in answers]
        check_conservation(thread_ranks.outcome_of(ranks), case, exchange, size)
        summed = not isinstance(case.codec, Codec) or case.codec.sum_dtype is not None
        if not summed or exchange in ("all_gather", "two_shot"):  # the transport does not add
            threads = average(case.codec, exchange, size)
            assert all(socket.mean.equal(thread.mean) for socket, thread in zip(ranks, threads, strict=True))


def tolerance(case, exchange, size):
    # A cast that the transport itself adds up owes the local half only: its sums round to 16 bits.
    return size * max(1e-6, case.rounding if exchange in ("all_reduce", "auto", "hierarchical") else 0.0)


@pytest.mark.parametrize(("case", "exchange", "size"), GRID)
def test_bytes_equal_the_formula(case, exchange, size):
    result = outcome(case.codec, exchange, size)
    if getattr(case.codec, "sparse", False) and exchange in ("split_gather", "auto") and not case.variable:
        known = case.codec.sent_share < 1 or exchange == "auto"
        assert result.counted == pytest.approx(result.promised, rel=0.02) or not known  # if ranks select independently
    elif exchange == "run_length" and (case.codec.sent_share < 1 and not case.variable):
        assert result.counted == pytest.approx(result.promised, rel=0.1)  # gaps are not quite those of random places
    elif exchange == "ok_topk":  # the first step is unlike most: see its own tests
        assert size == 1 or min(result.counted) > 0
    elif exchange in SPARSE + DROPPING:  # nothing is known of the others
        known = (case.codec.sent_share < 1 and not case.variable) or isinstance(case.codec, Dense)
        assert sum(result.counted) == pytest.approx(sum(result.promised), rel=0.03) or not known
        assert result.counted == pytest.approx(result.promised, rel=0.06) or not known
    else:
        assert result.counted == result.promised or case.variable
    counted, promised = result.counted[0], result.promised[0]
    if exchange == "all_gather":
        pad = lambda count: -(-count // 16) * 16  # noqa: E731
        message = 16 + pad(4 * DENSE.numel) + pad(case.message_size(LARGE))
        if case.variable:  # the formula is the most that there may be; lengths travel too
            assert (size - 1) * 32 <= counted <= (size - 1) * (message + 32)
        else:
            assert promised == (size - 1) * message


@pytest.mark.parametrize(("case", "exchange", "size"), [each for each in GRID if each.values[0].lossless])
def test_lossless_settings_are_the_mean(case, exchange, size):
    assert thread_ranks.lost(average(case.lossless, exchange, size)) <= 1e-6


@pytest.mark.parametrize(("case", "exchange", "size"), [each for each in GRID if each.values[2] in (2, 3)])
def test_a_flag_on_any_rank_reaches_every_rank(case, exchange, size):
    assert thread_ranks.flags_arrive(case.codec, pattern(exchange), size)
    assert outcome(case.codec, exchange, size).zero_flags


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if can_travel(case, "two_shot") and not isinstance(case.codec, ATOMO)],
    ids=lambda case: case.name,
)
def test_two_shot_traffic_does_not_grow_with_the_ranks(case):
    few, many = (promised(case.codec, "two_shot", size) for size in (4, 16))
    assert many <= case.growth * few + 2 * 15 * 112  # the heads of messages weigh more where shards are this small


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_auto_never_sends_more_than_dense(case):
    for size in (2, 3, 8, 16):
        sent = promised(case.codec, Auto(fallback="dense"), size)
        assert sent <= promised(Dense(), "all_reduce", size)


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "none"], ids=lambda case: case.name)
def test_what_is_named_compresses(case, monkeypatch):
    monkeypatch.setattr(probe, "time_link", lambda collective, device: Link(1e-7, 1e13))  # where nothing pays
    for size in (2, 3, 8):
        meter = Meter(CPU)
        plans = run_threads(size, lambda ranks, meter=meter: group_plan(case.codec, Auto(), ranks, meter))
        compressed = slice(DENSE.numel, DENSE.numel + LARGE.numel)
        assert not any(plan.is_dense(compressed) for plan in plans)


UNBIASED = [case.codec for case in unbiased_cases()] + [QSGD(), QSGD(2), QSGD(8), Rotated(), Natural(), TernGrad(None)]
NOISE = {  # by exchange: times the least that the ranks, or nodes, can leave of the noise of one
    "all_gather": lambda ranks: 1.0,
    "two_shot": lambda ranks: 2.0,
    "auto": lambda ranks: 2.0,
    "hierarchical": lambda ranks: 2.0 * 2,  # nodes of two send one sum
    "binomial": lambda ranks: 1 + math.log2(ranks) / 2,  # a sum is encoded at each level
}
NOISY = PATTERNS | {
    "auto": Auto("never", {"latency_s": 1e-4, "bytes_per_s": 1.25e7}),
    "hierarchical": Hierarchical("two_shot", 2),
}


@cache
def own_noise(codec):
    """Of one rank's message."""
    return thread_ranks.variance_and_bias(AllGather(), codec, LocalCollective())[0]


@pytest.mark.parametrize("exchange", NOISE)
@pytest.mark.parametrize(("codec", "size"), by_turns(UNBIASED, (4, 8), 1, repr))
def test_private_noise_averages_out(codec, exchange, size):
    left = run_threads(size, lambda ranks: thread_ranks.variance_and_bias(NOISY[exchange], codec, ranks)[0])[0]
    room = 1.4 if isinstance(codec, ATOMO) else 1.1  # one number decides what is sent of a matrix
    assert left <= room * NOISE[exchange](size) * own_noise(codec) / size
    if exchange == "all_gather":
        assert left >= own_noise(codec) / size / room


@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_sums_are_encoded_with_less_noise_than_is_left_of_the_messages(codec):
    assert codec.refined(1) == codec
    for ranks in (2, 3, 4, 8, 16):
        assert own_noise(codec.refined(ranks)) <= 1.05 * own_noise(codec) / ranks


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.codec, Codec)], ids=lambda case: case.name)
def test_the_sum_of_one_rank_is_its_message(case):
    assert case.codec.refined(1) == case.codec


def means_by_scale(collective, codec, exchange):
    """The gradient, the mean and the residual of a second step, by scale."""
    found = {}
    for scale in EXTREMES:
        send = thread_ranks.mean_sender(codec, exchange, collective, SMALL)
        for step in range(2):
            given = make("normal", SMALL.numel, 10 * step + collective.rank).mul_(scale)
            vector = given.clone()
            found[scale] = given.double(), send(vector, step).double(), vector.double()
    return found


@pytest.mark.parametrize(("case", "size"), by_turns(CASES, (2, 3), 1))
def test_gradients_of_any_scale_lose_the_same(case, size):
    """What is not sent stays in the residual. Beyond the method's range it counts as zero, where there is none."""
    for exchange in [PATTERNS[each] for each in ("all_gather", "two_shot", "auto") if can_travel(case, each, size)]:
        ranks = run_threads(size, lambda ranks, exchange=exchange: means_by_scale(ranks, case.codec, exchange))
        errors = {}
        for scale in EXTREMES:
            given, means, rests = (torch.stack(each) for each in zip(*(rank[scale] for rank in ranks), strict=True))
            assert all(mean.equal(means[0]) and mean.isfinite().all() for mean in means)
            total = given.sum(0)
            lacks = (size * means[0] + rests.sum(0) - total).abs().max() / given.abs().max()
            assert lacks <= max(1e-5, tolerance(case, "auto", size)) or not case.codec.conserves
            errors[scale] = float((size * means[0] - total).norm() / total.norm())
            assert case.scales or means[0].equal(ranks[0][1.0][1])
        if case.scales:
            case.check_errors(errors)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_page_says_what_counts_as_zero(case):
    if case.scales and case.scales[0] > EXTREMES[0] and automatic(case.codec, None) == "none":
        assert re.search(r"counts? as\s+zero", type(case.codec).__doc__)


def sum_and_source(collective, case, exchange):
    """Whether a mean leaves and gives the same of a sum, and of a source that adds the same two."""
    gradient, residual = thread_ranks.vector(collective.rank), thread_ranks.vector(collective.rank, 1)
    found = []
    for adds in (False, True):
        plan = group_plan(case.codec, exchange, collective, Meter(CPU))
        vector = torch.full_like(gradient, 7.0) if adds else gradient + residual
        source = Source(gradient.clone(), residual.clone(), vector) if adds else None
        mean, flag = torch.full_like(gradient, 7.0), torch.tensor(0.0)
        plan.mean(vector, mean, 5, flag, source)
        found.append((vector, mean, flag))
    return all(one.equal(other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_source_is_sent_as_its_sum(case, size):
    for exchange in (each for each in ("all_gather", "two_shot", "auto") if can_travel(case, each, size)):
        assert all(run_threads(size, lambda ranks, exchange=exchange: sum_and_source(ranks, case, exchange)))


def test_spectra_keep_more_of_sums():
    assert FFT(theta=0.7).refined(4).theta == pytest.approx(0.4)
    assert FFT(theta=0.7).refined(16).theta == 0


def test_every_codec_has_a_case():
    known = CODECS.complete() | REDUCERS.complete()
    assert {type(case.codec) for case in CASES} == {*known.values()}
    assert {case.name for case in CASES} >= {*known}


@pytest.mark.parametrize("codec", CODECS.complete().values(), ids=CODECS.complete())
def test_kernels_have_settings_to_be_compared_with(codec):
    own = Path(inspect.getfile(codec))
    for compiler in ("numba", "triton"):
        if own.with_name(f"{own.stem}_{compiler}.py").exists():
            assert any(type(case.codec) is codec and getattr(case, compiler) for case in CASES)
