"""Reducers find by kernels what they find by tensor operations on the same device."""

import pytest

from lightning_compress.collectives import run_threads
from lightning_compress.settings.run_state import RunState
from tests.triton.test_groups import plain, program, spoilt, without

pytestmark = pytest.mark.usefixtures("one_at_a_time")


def small(rank, step, parts):
    """Gradients that are denormal numbers, and then zeros."""
    for part in parts:
        part.mul_(1e-40 if step == 1 else 0.0)


@pytest.mark.parametrize(
    ("given", "happens"),
    [
        *(({}, happens) for happens in (plain, without, spoilt, small)),
        ({"warm_start": False}, spoilt),
        ({"rank": 1}, plain),
        ({"rank": 100}, spoilt),
    ],
)
def test_powersgd(given, happens, device, by):
    settings = RunState.of({"name": "powersgd", **given}, "auto")
    found, more = [], happens is without  # two passes in a step
    for choice in ("torch", "triton"):
        by(choice)
        found.append(run_threads(2, lambda ranks: program(ranks, device, settings, happens, more, more)))
    for one, other in zip(*found, strict=True):
        for expected, actual in zip(one, other, strict=True):
            assert actual.nan_to_num(9.0).equal(expected.nan_to_num(9.0))
    assert not found[0][0][0].equal(found[0][0][4]) or happens is small
