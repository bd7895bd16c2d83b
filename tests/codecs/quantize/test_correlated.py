"""Rounding by random bits that ranks share: the rules, every rank's own mean, and what that does to the ranks' mean."""

import numpy as np
import pytest
import torch

from lightning_compress.codecs import QSGD, Rotated
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.natural import Natural
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.contrib.exchanges.binomial import Binomial
from lightning_compress.contrib.exchanges.run_length import RunLength
from lightning_compress.contrib.gossip.dcd import DCD
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import permutation
from lightning_compress.exchanges import AllGather, TwoShot
from lightning_compress.exchanges.message import Section
from lightning_compress.gossip.build import build_gossip_compressor
from lightning_compress.settings.run_state import RunState
from tests.codecs.helpers import CPU, layout, make
from tests.codecs.quantize.test_quantisers import check_levels
from tests.corrections.helpers import Walker, gradient, on_ranks
from tests.reference import codecs as reference
from tests.reference import ternary

CODECS = [Rotated(2, 64), QSGD(3, 64), QSGD(2, 64, "l2", "elias"), TernGrad(None), Natural(64)]
CORRELATED = [type(codec)(**{**vars(codec), "correlated": True}) for codec in CODECS]
NUMEL = 2048


def sent(plan, vector, key):
    """What one message stands for, and the message."""
    message, decoded = torch.zeros(plan.message_size, dtype=torch.uint8), torch.empty_like(vector)
    plan.encode(vector.clone(), message, key)
    plan.decode(message[None, : plan.used], decoded, 1.0, False)
    return decoded, message


@pytest.mark.parametrize(("place", "places"), [(0, 3), (2, 3), (3, 4), (5, 7)])
def test_equals_the_references(place, places):
    """A rank's random numbers are those of the common key, moved on by its share of [0, 1)."""
    vector, share = make("normal", NUMEL), place / places
    messages = []
    for codec in CORRELATED:
        plan = codec.plan(layout(NUMEL), CPU)
        plan.correlate(9, place, places)
        messages.append(sent(plan, vector, 77))  # a key that has no effect
    _, levels = reference.levels(messages[1][1], NUMEL // 64, NUMEL, 3)
    check_levels(levels, reference.qsgd_numbers(vector.numpy(), 3, 64, "max")[1], 0.0, 9, 1e-4, share)
    places_of = np.array(reference.rotated_blocks(NUMEL, 64))
    norms, levels = reference.levels(messages[0][1], len(places_of), NUMEL, 2)
    coefficients, numbers = vector.numpy()[places_of] @ reference.rotation(64).T / 64, np.zeros(NUMEL)
    numbers[places_of] = coefficients * 1.5 / norms[:, None]
    check_levels(levels, numbers, 0.5, 9, 1e-2, share)
    np.testing.assert_array_equal(messages[4][0], reference.natural(vector.numpy(), 64, 9, share)[0])
    ranges = [(each.offset, each.end) for each in layout(NUMEL).segments if each.numel]
    scales, numbers = ternary.parse_terngrad(messages[3][1], len(ranges), NUMEL, "2bit")
    exact = ternary.terngrad_chances(vector.numpy(), list(scales), list(scales), ranges, 9, share)
    wrong = numbers != np.floor(exact)
    assert (np.abs(exact - np.round(exact))[wrong] <= 1e-5).all()
    quantised = QSGD(2, 64, "l2", correlated=True).plan(layout(NUMEL), CPU)
    quantised.correlate(9, place, places)
    assert messages[2][0].equal(sent(quantised, vector, 1)[0])  # the other coding


@pytest.mark.parametrize("codec", CORRELATED, ids=repr)
def test_nothing_changes_until_ranks_are_told_their_places(codec):
    vector = make("heavy", NUMEL)
    own = CODECS[CORRELATED.index(codec)].plan(layout(NUMEL), CPU)
    assert sent(codec.plan(layout(NUMEL), CPU), vector, 3)[1].equal(sent(own, vector, 3)[1])


@pytest.mark.parametrize("codec", CORRELATED, ids=repr)
def test_every_rank_is_right_on_average(codec):
    plan, vector, draws = codec.plan(layout(NUMEL), CPU), make("normal", NUMEL), 200
    total, error = torch.zeros(NUMEL, dtype=torch.float64), 0.0
    for key in range(draws):
        plan.correlate(key, 2, 3)
        decoded = sent(plan, vector, 0)[0].double()
        total += decoded
        error += float((decoded - vector).square().sum())
    assert float((total / draws - vector).square().sum()) <= 2 * error / draws**2


def means(codec, exchange, size, keys, common):
    """Squared errors of a mean of ranks' vectors, on average, and of the average of these means."""
    whole = Layout.of([("weight", (96, 64)), ("odd", (37,))])
    parts = [torch.randn(whole.numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    if common:
        parts = parts[:1] * size
    exact = torch.stack(parts).double().mean(0)

    def program(collective):
        plan = exchange.plan([Section(codec, whole, 0)], World(collective, CPU, Meter(CPU)))
        out, total, error = torch.empty(whole.numel), torch.zeros_like(exact), 0.0
        for key in range(keys):
            plan.mean(parts[collective.rank].clone(), out, key, torch.tensor(0.0))
            total += out
            error += float((out - exact).square().sum())
        return error / keys, float((total / keys - exact).square().sum())

    return run_threads(size, program)[0]


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_variance_of_the_mean_is_less(size, common):
    usual = AllGather() if size < 4 else TwoShot()  # as auto chooses
    for codec in (Rotated(2), Rotated(3), Rotated(), QSGD(2), QSGD()):
        correlated = type(codec)(codec.bits, correlated=True)
        for exchange in {AllGather(), usual}:
            own, shared = (means(each, exchange, size, 1, common)[0] for each in (codec, correlated))
            assert shared <= (0.8 if size >= 4 else 0.9) * own, (codec, exchange)
            assert not common or exchange == TwoShot() or shared <= 1.3 / size * own


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize(("exchange", "size"), [(AllGather(), 4), (TwoShot(), 4), (TwoShot(sums="same"), 2)], ids=repr)
def test_the_mean_is_right_on_average(exchange, size, common):
    """Also where an owner encodes a sum of what shared random bits have rounded, by the same plan."""
    error, left = means(QSGD(2, correlated=True), exchange, size, 50, common)
    assert left <= 1.2 * error / 50


def test_exact_sums_of_messages_have_them_too():
    """Any method may go by runs of zeros."""
    own, shared = (means(codec, RunLength(), 3, 1, True)[0] for codec in (QSGD(2), QSGD(2, correlated=True)))
    assert shared <= 1.3 / 3 * own
    assert shared == pytest.approx(means(QSGD(2, correlated=True), AllGather(), 3, 1, True)[0], rel=1e-3)


def test_places_are_drawn():
    drawn = [permutation(key, 4) for key in range(240)]
    assert len({tuple(each) for each in drawn}) == 24
    assert np.abs(np.mean(drawn, axis=0) - 1.5).max() < 0.3


@pytest.mark.parametrize("size", [1, 3, 4])
def test_it_resumes_bit_for_bit(size):
    """In a group, whose steps and keys are all that there is to save beside the residual."""
    settings = {"exchange": "auto" if size == 1 else "all_gather" if size == 3 else "two_shot", "error_feedback": True}
    compressor = {"name": "rotated", "bits": 2, "correlated": True}

    def program(collective):
        through, again = (Walker(collective, compressor, **settings) for _ in range(2))
        for step in range(4):
            if step == 2 and size > 1:
                again.group.states["residual"].committed.copy_(through.group.states["residual"].committed)
            mean = through.reduce(gradient(collective.rank, step), step)
            through.commit()
            if step >= 2:
                assert again.reduce(gradient(collective.rank, step), step).equal(mean)
                again.commit()
        return mean

    first, *others = on_ranks(size, program)
    assert all(each.equal(first) for each in others)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_is_refused(codec):
    kind, name = type(codec), codec.name
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(correlated='yes'\)"):
        kind(correlated="yes")
    with pytest.raises(ValueError, match="exchange='binomial' encodes sums of few ranks"):
        RunState.of({"name": name, "correlated": True}, exchange="binomial")
    for exchange in (TwoShot, Binomial):
        with pytest.raises(ValueError, match="one rank encodes each sum"):
            exchange(sums={"name": name, "correlated": True})
    with pytest.raises(ValueError, match="gossip has no mean over all ranks"):
        build_gossip_compressor({"name": name, "correlated": True}, DCD())
    assert Binomial().check(codec) is None
