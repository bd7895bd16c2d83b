"""Ranks that are killed, stopped, interrupted, or fail: the others stop and say why, and nothing is lost.

The harness is that of ``benchmarks/faults.py``: real processes over Gloo, faults brought about from outside.
"""

import itertools

import pytest

from benchmarks.harness.faults.injection import INJECTIONS
from benchmarks.harness.faults.training import METHODS
from benchmarks.harness.faults.trial import SkippedError, Trials


@pytest.fixture(scope="module")
def trials():
    """Runs never disturbed are made once."""
    return Trials()


def check(trials, fault, method, size, seed):
    try:
        trial = trials.run(fault, method, size, seed)
    except SkippedError as reason:
        pytest.skip(str(reason))
    assert not trial.problems
    assert trial.seconds
    assert trial.repeated <= 2
    if fault not in ("stopped", "SIGTERM", "SIGTERM to one rank"):  # nobody waits for the time limit, which is 30 s
        assert max(trial.seconds) < 15


FAULTS = list(INJECTIONS)
WORLDS = [("topk", 2), ("powersgd", 2), ("onebit", 2), ("dgc", 3)]


# One of each kind in every run, the others with the thorough tests.
KINDS = {
    "killed in forward",
    "killed while writing its part",
    "stopped",
    "SIGTERM to one rank",
    "part flipped",
}


@pytest.mark.parametrize(
    "fault", [each if each in KINDS else pytest.param(each, marks=pytest.mark.thorough) for each in FAULTS]
)
def test_nothing_is_lost(trials, fault):
    number = FAULTS.index(fault)
    check(trials, fault, *WORLDS[number % 4], seed=number // 4)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("method", "size"), list(itertools.product(METHODS, (2, 3, 4))))
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost_anywhere(trials, fault, method, size, seed):
    check(trials, fault, method, size, seed)


def test_the_run_has_several_groups_and_a_residual(trials):
    for outcome in trials.undisturbed("topk", 2).outcomes:
        assert outcome["groups"] >= 3
        assert outcome["residual"] > 0
    first, second = trials.undisturbed("topk", 2).outcomes
    assert first["parameters"] == second["parameters"]
    assert first["state"] != second["state"]
