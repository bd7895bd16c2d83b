"""The same settings by Python, the command line, Hydra and Fabric: the same bytes and weights; Ray's in test_ray.py."""

import warnings

import hydra
import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from lightning.pytorch.cli import LightningCLI

from lightning_compress import CompressedDDPStrategy, fabric
from tests.config.composing import CONF, ROOT
from tests.front_ends.fabric_loop import launched, set_up, train
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer

STEPS = 5
TEMPLATE = str(ROOT / "examples/hydra_template/configs")
SETTINGS = {
    "onebit": {"compressor": {"name": "onebit", "block": 256}, "bucket_cap_mb": 0.02},
    "topk": {
        "compressor": {"name": "topk", "density": 0.05},
        "exchange": {"name": "two_shot"},
        "error_feedback": {"decay": 0.9},
        "rules": [{"match": "head.2.*", "compressor": "none"}],
        "schedule": {"density": {0: 0.5, 2: 0.05}},
        "min_numel": 100,
        "seed": 3,
    },
}


def by_python(settings, folder):
    return quiet_trainer(CompressedDDPStrategy(**settings), max_steps=STEPS)


def by_cli(settings, folder):
    """All settings in a YAML file, as of ``--config``."""
    plain = {"max_steps": STEPS, "accelerator": "cpu", "devices": torch.distributed.get_world_size(), "logger": False}
    plain |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = {"class_path": "lightning_compress.CompressedDDPStrategy", "init_args": settings}
    path = f"{folder}/cli{torch.distributed.get_rank()}.yaml"
    with open(path, "w") as file:
        yaml.safe_dump({"trainer": plain | {"strategy": strategy}}, file)
    return LightningCLI(Net, save_config_callback=None, args=[f"--config={path}"], run=False).trainer


def typed(value):
    """A value as on Hydra's command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{typed(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(typed, value)) + "]"
    return f"'{value}'" if isinstance(value, str) else str(value)


def by_hydra(settings, folder):
    """A command line for the configs in the layout of lightning-hydra-template."""
    given = dict(settings)
    line = [f"trainer.devices={torch.distributed.get_world_size()}", f"hydra.searchpath=[file://{CONF}]"]
    line += ["trainer.default_root_dir=.", "trainer.max_epochs=-1", f"+trainer.max_steps={STEPS}"]
    line += [f"+trainer.{name}=false" for name in ("logger", "enable_checkpointing", "enable_model_summary")]
    for group in ("compressor", "exchange"):
        chosen = dict(given.pop(group, {"name": "auto"}))
        line.append(f"{group}={chosen.pop('name')}")
        line += [f"{group}.{name}={typed(value)}" for name, value in chosen.items()]
    line += [f"trainer.strategy.{name}={typed(value)}" for name, value in given.items()]
    with initialize_config_dir(version_base="1.3", config_dir=TEMPLATE):
        return hydra.utils.instantiate(compose("train", line).trainer)


def ended(way, settings, folder):
    """Weights and traffic of this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "fabric":
            trained = launched(fabric.CompressedDDPStrategy(**settings))
            model, optimizer = set_up(trained)
            train(trained, model, optimizer, STEPS)
        else:
            trained = {"python": by_python, "cli": by_cli, "hydra": by_hydra}[way](settings, folder)
            torch.manual_seed(1)
            model = Net()
            trained.fit(model, loader(digits()))
    stats = trained.strategy.comm_stats()
    return parameters(model).numpy(), [stats[name] for name in ("total_bytes_sent", "residual_norm", "summary")]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_way_sends_and_ends_the_same(pools, tmp_path, settings):
    first = pools[2].run(ended, "python", settings, str(tmp_path))
    assert first[0][1][0] > 0
    for way in ("cli", "hydra", "fabric"):
        for (weights, sent), (others, too) in zip(
            first, pools[2].run(ended, way, settings, str(tmp_path)), strict=True
        ):
            assert sent == too, way
            assert np.array_equal(weights, others), way
