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
from lightning_compress.settings.settings import Settings

NO_SETTINGS = {"self", "kwargs", "state", "strict_state"}
SHOWN = {
    name: each.default
    for name, each in inspect.signature(CompressedDDPStrategy.__init__).parameters.items()
    if name not in NO_SETTINGS
}
CONF = Path(__file__).parents[2] / "conf/strategy/compressed_ddp.yaml"
CONFIGURED = OmegaConf.create({"strategy": OmegaConf.load(CONF)}).strategy  # without a run, whose seed it would take


def test_what_the_strategy_shows_is_what_runs_without_it():
    assert Settings.of(**SHOWN) == Settings.of("auto")
    assert CompressedDDPStrategy()._settings == Settings.of("auto")


def test_the_configuration_changes_nothing():
    given = {name: CONFIGURED[name] for name in SHOWN.keys() - {"compressor", "exchange"}}
    assert Settings.of("auto", **given) == Settings.of("auto")


@pytest.mark.parametrize("name", SHOWN)
def test_every_setting_is_documented(name):
    assert f"\n    {name}: " in inspect.getdoc(CompressedDDPStrategy)


@pytest.mark.parametrize(
    "changed",
    [
        {"warmup_steps": 3},
        {"seed": 5},
        {"residual_decay": 0.5},
        {"residual_follows_lr": True},
        {"residual_dtype": torch.bfloat16},
        {"local_clip_norm": 2.0},
        {"local_clip_by": "bucket", "local_clip_norm": 2.0},
        {"deterministic": True},
        {"on_nonfinite": "skip"},
        {"on_drift": "resync"},
        {"check_drift_every": 7},
    ],
    ids=str,
)
def test_every_setting_arrives(changed):
    given = {name: "bfloat16" if value is torch.bfloat16 else value for name, value in changed.items()}
    strategy = CompressedDDPStrategy("topk", **given)
    for name, value in changed.items():
        assert getattr(strategy._settings, name) == value
        assert getattr(Settings.of("topk"), name) != value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"local_clip_by": "bucket"}, "local_clip_by='bucket' says whose norm local_clip_norm is, and there is none"),
        ({"on_drift": "resync", "check_drift_every": 0}, "on_drift='resync' and check_drift_every=0"),
    ],
    ids=["clip", "drift"],
)
def test_what_nothing_would_come_of_is_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Settings.of("topk", **given)


@pytest.mark.parametrize(("given", "meant"), [("residual_decai", "residual_decay"), ("exclud", "exclude")])
def test_attach_refuses_what_it_does_not_know_and_says_what_may_be_meant(pools, given, meant):
    for said in pools[1].run(_attached, given):
        assert f"unexpected keyword argument {given!r}; did you mean {meant!r}?" in said


def _attached(name):
    try:
        attach(DistributedDataParallel(nn.Linear(3, 3)), "topk", **{name: 1})
    except TypeError as error:
        return str(error)
    return ""
