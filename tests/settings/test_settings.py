"""A setting is written where it is checked, and where a user sees it: the strategy and the configuration agree."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.corrections.clipping import Clipping
from lightning_compress.corrections.loco import LoCo
from lightning_compress.settings.compensation import Feedback, Residual
from lightning_compress.settings.options import Options
from lightning_compress.settings.run_state import RunState

NO_SETTINGS = {"self", "kwargs", "state", "strict_state"}
SHOWN = {
    name: each.default
    for name, each in inspect.signature(CompressedDDPStrategy.__init__).parameters.items()
    if name not in NO_SETTINGS
}
CONF = Path(__file__).parents[2] / "conf/strategy/compressed_ddp.yaml"
CONFIGURED = OmegaConf.create({"strategy": OmegaConf.load(CONF)}).strategy  # without a run, whose seed it would take


def test_what_the_strategy_shows_is_what_runs_without_it():
    assert RunState.of(**SHOWN) == RunState.of("auto")
    assert CompressedDDPStrategy()._settings == RunState.of("auto")


def test_the_configuration_changes_nothing():
    given = {name: CONFIGURED[name] for name in SHOWN.keys() - {"compressor", "exchange"}}
    assert RunState.of("auto", **given) == RunState.of("auto")


@pytest.mark.parametrize("name", SHOWN)
def test_every_setting_is_documented(name):
    assert f"\n    {name}: " in inspect.getdoc(CompressedDDPStrategy)


@pytest.mark.parametrize(
    "changed",
    [
        {"warmup_steps": 3},
        {"seed": 5},
        {"error_feedback": Feedback(residual=Residual(decay=0.5))},
        {"error_feedback": Feedback(residual=Residual(follows_lr=True))},
        {"error_feedback": Feedback(residual=Residual(dtype=torch.bfloat16))},
        {"local_clip_norm": Clipping(2.0)},
        {"local_clip_norm": Clipping(2.0, "bucket")},
        {"deterministic": True},
        {"on_nonfinite": "skip"},
        {"on_drift": "resync"},
        {"check_drift_every": 7},
    ],
    ids=str,
)
def test_every_setting_arrives(changed):
    strategy = CompressedDDPStrategy("topk", **changed)
    for name, value in changed.items():
        assert getattr(strategy._settings.options, name) == value
        assert getattr(Options.of("topk"), name) != value


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (True, Feedback("classical")),
        ("residual", Feedback("classical")),
        (False, Feedback("none")),
        (None, Feedback()),
        ("auto", Feedback(needs_optimizer=True)),
        ("loco", Feedback(LoCo())),
        ({"name": "loco", "beta": 0.2}, Feedback(LoCo(beta=0.2))),
        ({"decay": 0.5}, Feedback(residual=Residual(0.5))),
        ({"name": "residual", "decay": 0.5}, Feedback("classical", residual=Residual(0.5))),
        ({"dtype": "bfloat16"}, Feedback(residual=Residual(dtype=torch.bfloat16))),
    ],
    ids=str,
)
def test_error_feedback_may_be_a_truth_a_name_or_a_mapping(given, read):
    assert Options.of("topk", error_feedback=given).error_feedback == read


@pytest.mark.parametrize(
    ("given", "read"),
    [(2, Clipping(2.0)), ({"norm": 2.0}, Clipping(2.0)), ({"norm": 2.0, "by": "bucket"}, Clipping(2.0, "bucket"))],
    ids=str,
)
def test_a_clip_may_be_a_norm_or_a_mapping(given, read):
    assert Options.of("topk", local_clip_norm=given).local_clip_norm == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"on_drift": "resync", "check_drift_every": 0}, "on_drift='resync' and check_drift_every=0"),
    ],
    ids=["drift"],
)
def test_what_nothing_would_come_of_is_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RunState.of("topk", **given)


@pytest.mark.parametrize(("given", "meant"), [("error_feedbak", "error_feedback"), ("rulez", "rules")])
def test_attach_refuses_what_it_does_not_know_and_says_what_may_be_meant(pools, given, meant):
    for said in pools[1].run(_attached, given):
        assert f"there is no argument {given!r}; did you mean {meant!r}?" in said


def _attached(name):
    try:
        attach(DistributedDataParallel(nn.Linear(3, 3)), "topk", **{name: 1})
    except TypeError as error:
        return str(error)
    return ""
