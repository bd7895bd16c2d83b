"""A run that goes on from a state: what the user names otherwise runs as named, and what was tuned goes on."""

import json

import pytest
import torch
from torch import nn

from lightning_compress.collectives import run_threads
from lightning_compress.engine.compression import Compression
from lightning_compress.settings.settings import Settings

FEW, MANY = {"name": "topk", "density": 0.01}, {"name": "topk", "density": 0.2}
SCHEDULE = {"density": {0: 0.3, 100: 0.01}}


def _run(collective, given, state=None, steps=1, tuned=None, **settings):
    """Take steps; returns the state, elements of the last mean that are not 0, the residual's norm, what is lost."""
    model = nn.Linear(64, 64, bias=False)
    parameters = list(model.parameters())
    compression = Compression(model, Settings.of(given, **settings), collective)
    compression.active = True
    if state is not None:
        compression.load_state_dict(state)
    optimizer = torch.optim.SGD(parameters, 0.0)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + collective.rank)
        parameters[0].grad = torch.randn(64, 64, generator=generator)
        compression.reduce(parameters, [parameters[0].grad])
        sent = int((parameters[0].grad != 0).sum())
        optimizer.step()
    if tuned:
        compression.retune(**tuned)
    norm = compression.stats().get("residual_norm", 0.0)
    state = compression.state_dict()
    compression.close()
    return state, sent, norm


def _again(first, second, tuned=None):
    """``(sent, residual's norm)`` of the first step after an earlier run's two."""

    def rank(collective):
        state, _, _ = _run(collective, steps=2, tuned=tuned, **first)
        assert json.dumps(state["running"])
        return _run(collective, state=state, **second)[1:]

    return run_threads(2, rank)[0]


def _fresh(given):
    return run_threads(2, lambda collective: _run(collective, given)[1])[0]


@pytest.mark.parametrize("schedule", [None, SCHEDULE])
def test_what_is_named_otherwise_runs_as_named(schedule):
    sent, _ = _again({"given": FEW, "schedule": schedule}, {"given": MANY})
    assert sent == pytest.approx(_fresh(MANY), rel=0.05)


def test_a_schedule_is_followed_from_where_the_run_is():
    sent, _ = _again({"given": FEW, "schedule": SCHEDULE}, {"given": MANY, "schedule": SCHEDULE})
    assert sent == pytest.approx(_fresh({"name": "topk", "density": 0.3}), rel=0.05)


def test_what_was_tuned_goes_on():
    sent, _ = _again({"given": FEW}, {"given": FEW}, tuned={"density": 0.2})
    assert sent == pytest.approx(_fresh(MANY), rel=0.05)


def test_what_was_tuned_goes_on_for_a_model_that_is_wrapped_anew():
    def rank(collective):
        first, second = (Compression(nn.Linear(64, 64), Settings.of(FEW), collective) for _ in range(2))
        first.active = second.active = True
        first.retune(density=0.2)
        second.follow(first)
        return second.settings.compressor.density

    assert run_threads(2, rank) == [0.2, 0.2]


def test_no_more_error_feedback_where_none_is_named():
    """What the earlier run has left travels once, and what encoding leaves now is not kept."""
    _, kept = _again({"given": FEW}, {"given": FEW})
    sent, norm = _again({"given": FEW}, {"given": FEW, "error_feedback": False})
    assert kept > 0
    assert sent > 0
    assert norm == 0


def test_it_is_said(caplog):
    _again({"given": FEW}, {"given": MANY})
    said = [each.message for each in caplog.records if "goes on with" in each.message]
    assert len(said) == 1
    assert said[0].index("0.01") < said[0].index("goes on with") < said[0].index("0.2")
