"""A run that goes on from a state: what the user names otherwise runs as named, and what was tuned goes on."""

import json

import pytest
import torch
from torch import nn

from lightning_compress.collectives import run_threads
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import bucket_of
from lightning_compress.settings.run_state import RunState

FEW, MANY = {"name": "topk", "density": 0.01}, {"name": "topk", "density": 0.2}
SCHEDULE = {"density": {0: 0.3, 100: 0.01}}


def _layers(*names):
    return nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in names})


def _step(compression, model, step, optimizer):
    """Take one; returns elements of the means that are not 0."""
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(10 * step + compression._collective.rank)
    for each in parameters:
        each.grad = torch.randn(each.shape, generator=generator)
    compression.reduce(bucket_of(compression, parameters), [each.grad for each in parameters])
    optimizer.step()
    return sum(int((each.grad != 0).sum()) for each in parameters)


def _run(collective, given, state=None, steps=1, tuned=None, names=("only",), rates=(), **settings):
    """Take steps; returns the state, elements of the last mean that are not 0, the residual's norm."""
    model = _layers(*names)
    compression = Compression(trained(model), RunState.of(given, **settings), collective)
    compression.active = True
    if state is not None:
        compression.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rates[step] if rates else 0.0
        sent = _step(compression, model, step, optimizer)
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
        first, second = (Compression(trained(nn.Linear(64, 64)), RunState.of(FEW), collective) for _ in range(2))
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
    said = [each.message for each in caplog.records if "continues with" in each.message]
    assert len(said) == 1
    assert said[0].index("0.01") < said[0].index("continues with") < said[0].index("0.2")


@pytest.mark.parametrize(
    ("named", "kinds"),
    [
        ({"error_feedback": False}, set()),
        ({"error_feedback": True}, {"residual"}),
        ({"error_feedback": {"decay": 0.9}}, {"residual"}),
        ({"rules": [{"match": "*", "compressor": "none"}]}, set()),
        ({"rules": [{"match": "first.*", "compressor": "none"}]}, {"loco"}),
    ],
    ids=str,
)
def test_what_loco_kept_stands_in_no_ones_way(named, kinds):
    """It owes nothing: the run goes on from its step without it."""
    names = ("first", "last")

    def rank(collective):
        state, _, kept = _run(collective, "onebit", steps=2, names=names, error_feedback="loco")
        state, _, _ = _run(collective, "onebit", state, names=names, **named)
        return kept, state["step"], {kind for group in state["groups"] for kind in group["states"]}

    for kept, step, found in run_threads(2, rank):
        assert kept > 0
        assert (step, found) == (3, kinds)


def test_a_state_of_other_parameters_is_no_state_of_this_model(caplog):
    def rank(collective):
        state, _, _ = _run(collective, FEW, steps=2, names=("first", "last"))
        with pytest.raises(ValueError, match=r"does not train \(first.weight, last.weight; it trains inner.weight"):
            _run(collective, FEW, state, names=("inner",))
        return _run(collective, FEW, state, names=("last", "new"))[0]["step"]

    assert run_threads(2, rank) == [3, 3]
    said = [each.message for each in caplog.records if "is ignored" in each.message]
    assert said == ["the checkpoint's state of first.weight is ignored: the model trains no such parameter"]


def test_a_model_that_is_wrapped_anew_counts_on():
    def rank(collective):
        model = _layers("only")
        first, second = (Compression(trained(model), RunState.of(FEW), collective) for _ in range(2))
        first.active = second.active = True
        first.meter.sample_every = 3
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(3):
            _step(first, model, step, optimizer)
        first.finite.count.fill_(2)
        second.follow(first)
        before = first.stats()
        first.close()
        _step(second, model, 3, optimizer)
        return before, second.stats(), second.meter.sample_every

    for before, after, every in run_threads(2, rank):
        assert (after["steps"], after["nonfinite_steps"], every) == (4, 2, 3)
        for name in ("total_bytes_sent", "total_bytes_dense"):
            assert after[name] == pytest.approx(4 / 3 * before[name])


def test_a_rate_that_rounds_to_less_than_0_is_0():
    """As LinearLR(end_factor=0.0) leaves it: the residual waits, and the state is one that is read."""

    def rank(collective):
        given = {"given": FEW, "error_feedback": {"follows_lr": True}}
        one, _, norm = _run(collective, steps=2, rates=[0.1, 0.0], **given)
        other, _, same = _run(collective, steps=2, rates=[0.1, -1.5e-18], **given)
        assert other["rates"] == one["rates"] == {"only.weight": 0.1}
        return norm == same, _run(collective, state=other, rates=[0.1], **given)[0]["step"]

    assert run_threads(2, rank) == [(True, 3)] * 2
