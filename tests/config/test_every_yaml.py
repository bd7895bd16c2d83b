"""Every config file composes, builds, and says what its class says."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path

import pytest
import torch
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lightning_compress import (
    AsyncGossipStrategy,
    CompressedDDPStrategy,
    CompressedFSDPStrategy,
    GossipStrategy,
    LocalSGDStrategy,
    Moniqua,
)
from lightning_compress.codecs import TopK
from lightning_compress.exchanges import EXCHANGES
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.strategies.constructors import LOCAL_STEPS
from lightning_compress_hydra import LightningCompressSearchPathPlugin
from recipes.config import build, by_group, recipe_of, refuse_foreign_data
from recipes.tables.idle import Outlasted, refuse_idle
from tests.config.composing import CONF, built, composed, lay_out
from tests.helpers.sounds import write_wavdir

FILES = sorted(path for path in CONF.glob("*/*.yaml") if path.parent.name != "lightning_compress")


def name(path: Path) -> str:
    return f"{path.parent.name}={path.stem}"


def loaded(path: Path) -> DictConfig:
    """A file, on top of the one of its group that it begins with, if there is any."""
    own = OmegaConf.load(path)
    assert isinstance(own, DictConfig)
    first = [each for each in own.pop("defaults", []) if isinstance(each, str) and "/" not in each and each != "_self_"]
    made = OmegaConf.merge(*(OmegaConf.load(path.with_name(f"{each}.yaml")) for each in first), own)
    assert isinstance(made, DictConfig)
    made.pop("defaults", None)
    return made


def option(path: Path) -> list[str]:
    """What chooses this file: data needs its recipe beside it."""
    recipe = [f"recipe={recipe_of(OmegaConf.load(path))}"] if path.parent.name == "data" else []
    strategy = ["strategy=gossip"] if name(path) == "compressor=moniqua" else []
    return [*recipe, *strategy, name(path)]


PACKAGED = [
    path
    for path in FILES
    if path.parent.name in ("backward", "compressor", "exchange", "minibatch", "strategy", "monitor", "recovery")
    and name(path) != "backward=none"  # which is nothing
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    lay_out(tmp_path / "data")


def test_groups() -> None:
    groups = {path.parent.name for path in CONF.glob("*/*.yaml")}
    wanted = (
        "recipe optimizer data compressor exchange strategy monitor recovery backward minibatch trainer logger "
        "experiment debug lightning_compress"
    )
    assert groups == set(wanted.split())


@pytest.mark.parametrize("path", FILES, ids=name)
def test_composes_and_builds(path: Path) -> None:
    sums = ("butterfly", "ok_topk", "recursive_doubling", "split_gather")  # which carry sparse methods alone
    cfg = composed(
        *option(path), *(["compressor=topk"] if path.parent.name == "exchange" and path.stem in sums else [])
    )
    if path.stem == "wavdir":  # its characters are those of its training part
        write_wavdir(Path(cfg.data.root))
    if cfg.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        OmegaConf.resolve(cfg)
        pytest.skip("no GPU to build this trainer for")
    _, model, trainer = built(cfg)
    averaging = CompressedDDPStrategy | CompressedFSDPStrategy | LocalSGDStrategy
    assert isinstance(trainer.strategy, averaging | GossipStrategy | AsyncGossipStrategy)
    assert sum(p.numel() for p in model.parameters()) > 200_000


@pytest.mark.parametrize("path", FILES, ids=name)
def test_head_comment_has_a_command_that_composes(path: Path) -> None:
    commands = [line for line in path.read_text().splitlines() if line.startswith("# run: ")]
    assert len(commands) == 1
    words = shlex.split(commands[0].removeprefix("# run: "), comments=True)
    assert words[:3] == ["python", "-m", "recipes.train"]
    cfg = composed(*by_group(words[3:]))
    OmegaConf.resolve(cfg)
    if cfg.data._target_ == "recipes.resnet.digits.Digits":  # what it shows happens, and within the run
        steps = cfg.trainer.max_epochs * (1257 // (cfg.trainer.devices * cfg.data.batch_size))
        assert all(length < steps for length in Outlasted.of(cfg).phases.values()) or path.parent.name == "debug"
    if cfg.trainer.accelerator != "gpu":
        trainer = build(cfg.trainer)
        trainer.callbacks[:0] = [build(cfg[group]) for group in ("backward", "minibatch") if cfg.get(group)]
        refuse_idle(cfg, trainer)


@pytest.mark.parametrize(
    ("group", "known"),
    [("compressor", {**COMPRESSORS.complete(), "moniqua": Moniqua}), ("exchange", EXCHANGES.complete())],
)
def test_every_method_has_a_file_with_exactly_its_settings(group: str, known: dict[str, type]) -> None:
    assert {path.stem for path in FILES if path.parent.name == group} == set(known)
    for option, cls in known.items():
        settings = OmegaConf.to_container(loaded(CONF / group / f"{option}.yaml"))
        assert isinstance(settings, dict)
        assert get_object(settings.pop("_target_")) is cls
        defaults = {key: each.default for key, each in inspect.signature(cls).parameters.items()}
        assert settings == defaults


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "strategy"], ids=name)
def test_strategy_shows_every_setting_of_ours(path: Path) -> None:
    shown = loaded(path)
    settings = set(inspect.signature(get_object(shown["_target_"])).parameters) - {"kwargs"}
    assert settings < set(shown)


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "strategy"], ids=name)
def test_the_seed_is_the_strategys_too(path: Path) -> None:
    assert composed(name(path), "seed=7").strategy.seed == 7


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "experiment"], ids=name)
def test_experiments_set_what_their_papers_do(path: Path) -> None:
    cfg, usual = composed(name(path)), {"resnet": 1e-4, "nmt": 1e-5, "lstm_speech": 1e-5}
    if cfg.compressor._target_ == "lightning_compress.corrections.DGC":  # decay goes through no momentum there
        assert cfg.optimizer.weight_decay == pytest.approx(10 * usual[str(recipe_of(cfg.recipe))])
    if cfg.recipe.get("depth") == 110:  # He et al. 2015, section 4.2
        assert (cfg.recipe.warmup_start, cfg.recipe.warmup_epochs) == (0.1, 1.0)
    if "else as He et al. 2015" in path.read_text():
        he = composed("experiment=resnet_he2015")
        assert all(cfg.recipe[key] == he.recipe[key] for key in ("decay_norm", "zero_gamma", "schedule"))


def test_a_strategys_compressor_is_the_group() -> None:
    command = "strategy=gossip strategy.algorithm=d2 strategy.compressor=moniqua strategy.compressor.bits=8"
    _, _, trainer = built(composed(*by_group(command.split())))
    assert trainer.strategy.synchroniser._compressor == Moniqua(bits=8)
    assert trainer.strategy.synchroniser._algorithm.name == "d2"
    written = ["strategy.compressor={name: moniqua, bits: 8}"]
    assert by_group(written) == written


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in FILES
        if path.parent.name in ("strategy", "monitor") or path.stem in ("meprop", "sufficient_factors")
    ],
    ids=name,
)
def test_defaults_are_those_of_python(path: Path) -> None:
    shown = OmegaConf.to_container(loaded(path))
    assert isinstance(shown, dict)
    cls = get_object(shown.pop("_target_"))
    defaults = {key: each.default for key, each in inspect.signature(cls).parameters.items()}
    preset = LOCAL_STEPS.get(path.stem, {})
    defaults |= preset
    ddp = {
        "start_method": "popen",
        "bucket_cap_mb": None,
    }  # of what goes on to the base class
    ddp |= dict.fromkeys(("process_group_backend",)) | {"save_distributed_checkpoint": True}
    ddp |= {name: each.default for name, each in inspect.signature(CompressedDDPStrategy).parameters.items()}
    ddp |= dict.fromkeys(("find_unused_parameters", "gradient_as_bucket_view", "static_graph"), False)
    for key, value in shown.items():
        if key in ("compressor", "exchange") and key not in preset:  # groups of their own
            option = OmegaConf.load(CONF / key / f"{defaults[key]}.yaml")
            assert get_object(option["_target_"]) is {"compressor": COMPRESSORS, "exchange": EXCHANGES}[key]["auto"]
        else:
            value = OmegaConf.create({"strategy": {key: value}}).strategy[
                key
            ]  # the seed: the run's, where there is one
            default = defaults.get(key, ddp.get(key))
            assert value == (list(default) if isinstance(default, tuple) else default), key


def test_without_a_word_the_primary_file_chooses_as_python_does() -> None:
    primary = OmegaConf.load(CONF / "config.yaml").defaults
    chosen = {key: value for each in primary if not isinstance(each, str) for key, value in each.items()}
    brought = OmegaConf.load(CONF / f"strategy/{chosen['strategy']}.yaml").defaults
    defaults = inspect.signature(CompressedDDPStrategy).parameters
    for key in ("compressor", "exchange"):
        assert {f"/{key}@_global_.{key}": defaults[key].default} in brought


@pytest.mark.parametrize("path", PACKAGED, ids=name)
def test_packaged_targets_are_public_and_resolve(path: Path) -> None:
    target = loaded(path)["_target_"]
    module, _, symbol = target.rpartition(".")
    assert target.startswith("lightning_compress.")
    assert symbol in get_object(module).__all__


def test_settings_of_another_method_are_refused() -> None:
    with pytest.raises(Exception, match="density"):
        composed("compressor=onebit", "compressor.density=0.1")


def test_unknown_compressor_lists_what_there_is() -> None:
    with pytest.raises(MissingConfigException) as info:
        composed("compressor=nosuch")
    assert all(option in str(info.value) for option in COMPRESSORS.offered)


def test_experiment_is_stronger_than_the_primary_file() -> None:
    assert composed("experiment=resnet_topk").trainer.devices == 2
    assert composed("experiment=resnet_topk", "trainer.devices=4").trainer.devices == 4


def test_experiment_is_stronger_than_the_recipe() -> None:
    assert composed("experiment=resnet_topk").data._target_ == "recipes.resnet.cifar10.Cifar10"
    assert composed("experiment=resnet_topk", "data=digits").data._target_ == "recipes.resnet.digits.Digits"
    assert composed("recipe=resnet", "optimizer=adamw").optimizer._target_ == "torch.optim.AdamW"


def test_data_of_another_recipe_is_refused() -> None:
    cfg = composed()
    refuse_foreign_data(cfg)
    cfg.data._target_ = "recipes.nmt.numbers.Numbers"
    with pytest.raises(ValueError, match=r"recipes.nmt.numbers.Numbers is of recipe=nmt, .* data=cifar10, digits"):
        refuse_foreign_data(cfg)
    with pytest.raises(ValueError, match=r"is of recipe=lstm_speech, and recipe=alexnet .* data=cifar10, digits"):
        refuse_foreign_data(composed("recipe=alexnet", "data=spoken"))
    with pytest.raises(ValueError, match=r"is of recipe=alexnet or resnet, and recipe=nmt cannot read it"):
        refuse_foreign_data(composed("recipe=nmt", "data=digits"))


def test_plugin_appends_our_groups() -> None:
    assert LightningCompressSearchPathPlugin in Plugins.instance().discover(SearchPathPlugin)
    path = ConfigSearchPathImpl()
    path.append("main", "pkg://theirs")
    LightningCompressSearchPathPlugin().manipulate_search_path(path)
    assert [each.path for each in path.get_path()] == ["pkg://theirs", "pkg://lightning_compress.conf"]


def test_a_strategy_with_a_compressor_of_its_own_takes_another_one() -> None:
    command = "trainer=cpu_2proc strategy=sparseloco strategy.compressor=topk"
    _, _, trainer = built(composed(*by_group(command.split())))
    assert isinstance(trainer.strategy.synchroniser.settings.compressor, TopK)
