"""Hydra in another application, in the layout of lightning-hydra-template (examples/hydra_template)."""

import os

import hydra
import pytest
from hydra import compose, initialize_config_dir

from lightning_compress import CompressedDDPStrategy, GossipStrategy, LocalSGDStrategy
from lightning_compress.codecs import TopK
from tests.config.composing import CONF, ROOT
from tests.helpers import forked

TEMPLATE = ROOT / "examples/hydra_template"
SCRIPT = TEMPLATE / "src/train.py"
FOUND = f"hydra.searchpath=[file://{CONF}]"  # what pkg://lightning_compress.conf is where this tree is not installed


def strategy_of(*overrides):
    with initialize_config_dir(version_base="1.3", config_dir=str(TEMPLATE / "configs")):
        cfg = compose("train", [FOUND, "trainer.default_root_dir=.", *overrides])
    return hydra.utils.instantiate(cfg.trainer, callbacks=[], logger=False).strategy


@pytest.mark.filterwarnings("ignore")
def test_the_strategy_brings_its_groups():
    options = "trainer.strategy.rules=[{match: head.*, compressor: none}]"
    strategy = strategy_of("compressor=topk", "compressor.density=0.3", "exchange=two_shot", options)
    assert isinstance(strategy, CompressedDDPStrategy)
    assert strategy._settings.method == TopK(density=0.3)
    assert strategy._settings.options.rules[0].match == ("head.*",)
    assert strategy._settings.options.seed == 0  # the template's own is null
    assert strategy_of("seed=7")._settings.options.seed == 7
    assert isinstance(strategy_of("trainer=ddp"), CompressedDDPStrategy)
    assert isinstance(strategy_of("strategy@trainer.strategy=diloco"), LocalSGDStrategy)
    gossip = "strategy@trainer.strategy=gossip"
    assert isinstance(strategy_of(gossip, "compressor=moniqua", "seed=null"), GossipStrategy)


def variables():
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(folder, *overrides):
    return forked.run(SCRIPT, FOUND, "hydra.run.dir=out", *overrides, cwd=folder, env=variables(), timeout=150)


def by_lightning(folder, *overrides):
    """The second rank is one that Lightning starts, by a command line for Hydra."""
    done = run(folder, *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def by_forks(folder, *overrides):
    return "\n".join(forked.ranks([SCRIPT, FOUND, "hydra.run.dir=out", *overrides], cwd=folder, env=variables()))


# recipes.train starts as the first of them does: tests/recipes/test_train.py
@pytest.mark.parametrize("train", [pytest.param(by_lightning, marks=pytest.mark.thorough), by_forks])
def test_it_trains_and_resumes(tmp_path, train):
    options = ["trainer.devices=2", "compressor=onebit", "seed=1"]
    assert "float32 would send 1.23 MB (20.9 x as much)" in train(tmp_path, *options)
    first = tmp_path / "out/checkpoints/epoch=0.ckpt"
    assert len(list(first.with_name(f"{first.name}.lc").iterdir())) == 2
    assert "begins again" not in train(tmp_path, *options, f"ckpt_path='{first}'")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+compressor=topk"], "compressor=topk has no effect: no strategy in the config takes it. Add 'strategy@"),
        (["compressor=topk"], "Could not override 'compressor'. No match in the defaults list"),
    ],
)
def test_a_compressor_without_our_strategy_is_an_error(tmp_path, overrides, said):
    done = run(tmp_path, "~strategy@trainer.strategy", *overrides)
    assert done.returncode == 1
    assert said in done.stderr
    assert not list(tmp_path.rglob("*.ckpt"))
