"""EF21 with momentum: estimates go after the momentum of every rank."""

import re

import numpy as np
import pytest
import torch

from lightning_compress.codecs import OneBit, TopK
from lightning_compress.collectives import World, run_threads
from lightning_compress.contrib.ef21 import EF21
from lightning_compress.engine.group import Group
from lightning_compress.settings.parsing import build_compressor
from lightning_compress.settings.run_state import RunState
from tests.corrections.helpers import (
    COMPRESSED,
    CPU,
    LENGTHS,
    NAMES,
    PARAMETERS,
    Walker,
    gradient,
    named,
    on_ranks,
    walk,
)
from tests.reference.codecs import topk
from tests.reference.ef21 import simulate_ef21

STEPS = 20
METHOD = EF21(eta=0.3, quantiser=TopK(0.1))


@pytest.mark.parametrize("size", [3, 4])
def test_it_is_the_papers(size):
    out, walkers = walk(size, METHOD, STEPS, exchange="all_gather")
    flat = lambda values: torch.cat([named(values)[name] for name in COMPRESSED]).numpy()  # noqa: E731
    gradients = [[flat(gradient(rank, step)) for rank in range(size)] for step in range(STEPS)]
    ends = np.cumsum([length for name, length in zip(NAMES, LENGTHS, strict=True) if name in COMPRESSED])
    segments = list(zip([0, *ends[:-1]], ends, strict=True))
    given, estimates = simulate_ef21(gradients, 0.3, lambda vector: topk(vector, 0.1, segments)[0])
    for found, slow in zip(out, given, strict=True):
        assert np.quantile(np.abs(flat(found) - slow), 0.999) <= 1e-5
    for walker, own in zip(walkers, estimates, strict=True):
        kept = torch.cat([walker.state("estimate")[name] for name in COMPRESSED]).numpy()
        assert np.quantile(np.abs(kept - own), 0.999) <= 1e-5


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot", "auto"])
@pytest.mark.parametrize("quantiser", ["onebit", {"name": "topk", "density": 0.05}], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_the_mean_of_the_estimates_is_what_the_optimizer_gets(size, quantiser, exchange):
    out, walkers = walk(size, EF21(quantiser=quantiser), 6, exchange=exchange)
    for name in NAMES:
        mean = sum(walker.state("estimate")[name].double() for walker in walkers) / size
        assert (named(out[-1])[name] - mean).abs().max() <= 1e-5 * mean.abs().max()
        assert all(walker.state("mean")[name].equal(named(out[-1])[name]) for walker in walkers)
    assert "residual" not in walkers[0].group.states


def test_a_constant_gradient_is_found():
    out, _ = walk(2, EF21(), 60, lambda rank, step: gradient(rank, 0))
    wanted = (gradient(0, 0) + gradient(1, 0)) / 2
    errors = [float((each - wanted).norm() / wanted.norm()) for each in out]
    assert errors[0] > 0.2
    assert errors[-1] < 0.1 * errors[0]


def test_a_run_that_kept_a_residual_goes_on():
    before = RunState.of("onebit", exchange="all_gather", error_feedback=True)
    after = RunState.of(EF21(eta=0.5), "all_gather").resumed({**before.running(), "scheduled": {}})

    def rank(collective):
        walker = Walker(collective, "ef21")
        walker.group = Group(PARAMETERS, after, World(collective, CPU, walker.meter))
        assert "residual" in walker.group.states
        for step in range(5, 11):
            walker.reduce(gradient(collective.rank, 0), step)
            walker.commit()
        return walker.state("mean"), walker.state("estimate")

    ranks = run_threads(2, rank)
    for name in COMPRESSED:
        mean = sum(estimate[name] for _, estimate in ranks) / 2
        assert (ranks[0][0][name] - mean).abs().max() <= 1e-5 * mean.abs().max()


def test_without_loss_it_is_momentum():
    out, _ = walk(2, EF21(eta=0.25, quantiser="none"), 5)
    momentum = None
    for step, found in enumerate(out):
        mean = (gradient(0, step) + gradient(1, step)) / 2
        momentum = mean if momentum is None else 0.75 * momentum + 0.25 * mean
        assert (found - momentum).abs().max() <= 1e-5


def test_a_step_that_is_rolled_back_never_was():
    def program(collective, strange):
        walker = Walker(collective, EF21(), exchange="all_gather")
        for step in range(5):
            if strange:
                walker.reduce(gradient(collective.rank, 77), step)
                walker.roll_back()
            last = walker.reduce(gradient(collective.rank, step), step)
            walker.commit()
        return last

    plain, other = (on_ranks(2, lambda ranks, strange=strange: program(ranks, strange)) for strange in (False, True))
    assert plain[0].equal(other[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eta": 0.0}, "eta must be in (0, 1]"),
        ({"quantiser": "rotated"}, "only unbiased"),
        ({"quantiser": "nosuch"}, "unknown quantiser 'nosuch'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_compressor({"name": "ef21", **settings})


@pytest.mark.parametrize("feedback", [True, "loco", {"decay": 0.5}], ids=str)
def test_a_residual_is_refused(feedback):
    with pytest.raises(ValueError, match="keeps no residual"):
        RunState.of("ef21", error_feedback=feedback)
    assert EF21().codec == OneBit()


@pytest.mark.parametrize(
    "name", [{"name": "randomk", "rescale": True}, "atomo", "wangni", "terngrad_shared", "signsgd"]
)
def test_rules_take_what_comes_closer(name):
    """As its quantiser: what is right on average only makes the estimates grow without bound."""
    rule = {"match": ["0.weight"], "compressor": name}
    with pytest.raises(ValueError, match="its estimates need a method that always comes closer"):
        RunState.of("ef21", rules=[rule])
    for fit in ("topk", "bf16", "none", "powersgd"):
        RunState.of("ef21", rules=[rule | {"compressor": fit}])
