"""A run that goes on from a checkpoint is the run that was never interrupted, whatever it trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import nn

from lightning_compress import CompressedDDPStrategy, MeSimp
from recipes import predict
from recipes.lstm_speech.module import SpeechModule
from recipes.lstm_speech.wavdir import WavDir
from recipes.nmt.module import TranslationModule
from recipes.resnet.digits import Digits
from recipes.resnet.imagefolder import ImageFolder
from recipes.resnet.module import AlexNetModule, Classifier
from recipes.tables.record import COSTS, Recorder
from recipes.task import Task
from tests.helpers.processes import Pools
from tests.helpers.sounds import write_wavdir
from tests.recipes.test_nmt import QUIET, TINY, tiny_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


class Dropping(Classifier):
    """A layer behind a dropout."""

    recipe = "dropping"

    def __init__(self, pixels: int, classes: int) -> None:
        layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(pixels, classes))
        super().__init__(layers, classes, optimizer=partial(torch.optim.SGD, lr=0.01), schedule="constant")


def digits(_: Path) -> tuple[LightningDataModule, Task]:
    return Digits(batch_size=32, train_size=160, val_size=32, augment=True), Dropping(64, 10)


def folder(path: Path, workers: int) -> tuple[LightningDataModule, Task]:
    rng = np.random.default_rng(0)
    for part, name in ((part, name) for part in ("train", "val") for name in "ab"):
        if not (path / part / name).exists():
            (path / part / name).mkdir(parents=True)
            for number in range(6 if part == "train" else 1):
                pixels = rng.integers(0, 256, (9 + number, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path / part / name / f"{number}.png")
    return ImageFolder(root=str(path), batch_size=4, size=8, num_workers=workers), Dropping(192, 2)


def speech(path: Path) -> tuple[LightningDataModule, Task]:
    data = WavDir(root=str(write_wavdir(path, ("do", "re", "mi", "do re"))), val=None, batch_size=2)
    return data, SpeechModule(**data.dims, layers=2, hidden=8, dropout=0.3)


def translation(path: Path) -> tuple[LightningDataModule, Task]:
    data = tiny_data(path, val_size=0)
    return data, TranslationModule(optimizer=partial(torch.optim.Adam, lr=5e-3), **data.dims, **TINY | {"dropout": 0.1})


MADE: dict[str, Callable[[Path], tuple[LightningDataModule, Task]]] = {
    "digits": digits,
    "pictures": partial(folder, workers=0),
    "pictures by workers": partial(folder, workers=1),
    "speech": speech,
    "translation": translation,
}
EACH_EPOCH = {"every_n_epochs": 1}


def weights(kind: str, path: Path, start: Path | None = None, save: Any = None, **settings: Any) -> dict[str, Any]:
    """What a training of three epochs ends with."""
    seed_everything(3, verbose=False)
    data, module = MADE[kind](path / "data")
    keep = {"dirpath": path / "kept", "filename": "{step}", "save_top_k": -1}
    watching = (
        {"callbacks": [ModelCheckpoint(**keep, **save)], "enable_checkpointing": True} if save is not None else {}
    )
    trainer = Trainer(**QUIET | {"max_epochs": 3} | watching | settings)
    trainer.fit(module, datamodule=data, ckpt_path=start)
    return module.state_dict()


@pytest.mark.parametrize(
    ("kind", "save", "settings"),
    [
        *((kind, EACH_EPOCH, {}) for kind in MADE),
        ("digits", {"every_n_train_steps": 4}, {}),  # in the middle of an epoch of five
        ("digits", {}, {"val_check_interval": 2}),
        ("digits", EACH_EPOCH, {"max_epochs": -1, "max_steps": 15}),
        ("pictures by workers", {"every_n_train_steps": 2}, {}),
        ("speech", {"every_n_train_steps": 1}, {"limit_val_batches": 0}),
        ("translation", {"every_n_train_steps": 4}, {}),
    ],
)
def test_goes_on_bit_for_bit(kind: str, save: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    expected = weights(kind, tmp_path, save=save, **settings)
    kept = sorted(tmp_path.glob("kept/*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    for start in (kept[0], kept[len(kept) // 2]):
        found = weights(kind, tmp_path, start, **settings)
        assert all(torch.equal(found[key], value) for key, value in expected.items()), start


def smaller(path: Path, start: Path | None = None) -> AlexNetModule:
    """A model that loses neurons after each epoch, and has learnt for two, or three."""
    seed_everything(3, verbose=False)
    data = Digits(batch_size=32, train_size=64, val_size=0)
    module = AlexNetModule(**data.dims, hidden=32, schedule="constant")
    pruner = MeSimp(0.1, cycle=1, prune=0.5, skip=["*features*"])
    trainer = Trainer(**QUIET | {"max_epochs": 3 if start else 2}, callbacks=[pruner])
    trainer.fit(module, datamodule=data, ckpt_path=start)
    trainer.save_checkpoint(path)
    return module


def test_neurons_that_were_removed_stay_so(tmp_path: Path) -> None:
    first = smaller(tmp_path / "2.ckpt")
    size = first.model.classifier[1].out_features
    assert size < 32
    loaded = predict.load(str(tmp_path / "2.ckpt"))
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in first.state_dict().items())
    assert smaller(tmp_path / "3.ckpt", tmp_path / "2.ckpt").model.classifier[1].out_features <= size


def test_a_checkpoint_of_another_model_is_refused_in_a_line() -> None:
    ours, theirs = (AlexNetModule(in_channels=1, image_size=8, hidden=hidden) for hidden in (16, 32))
    saved = {"state_dict": theirs.state_dict(), "hyper_parameters": dict(theirs.hparams)}
    with pytest.raises(ValueError, match=r"of another model, by 5 parameters such as .*; make .*: hidden=32$"):
        ours.on_load_checkpoint(saved)


def costs(path: str, start: str | None) -> dict[str, float]:
    """What a rank counts in four epochs of two steps, with a checkpoint after every third."""
    seed_everything(3, verbose=False)
    (data, module), keep = digits(Path(path)), ModelCheckpoint(path, "{step}", every_n_train_steps=3, save_top_k=-1)
    strategy = CompressedDDPStrategy({"name": "topk", "density": 0.1}, min_numel=1)
    several = {"devices": 2, "max_epochs": 4, "enable_checkpointing": True, "callbacks": [Recorder(), keep]}
    trainer = Trainer(**QUIET | several, strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data, ckpt_path=start)
    return {name: float(trainer.callback_metrics[f"run/{name}"]) for name in COSTS}


def test_counts_on(tmp_path: Path, pools: Pools) -> None:
    whole, _ = pools[2].run(costs, str(tmp_path), None)
    found, _ = pools[2].run(costs, str(tmp_path), str(tmp_path / "step=3.ckpt"))
    assert whole["steps"] == 8
    assert found.pop("seconds") == pytest.approx(whole.pop("seconds"), abs=20)
    assert found | {"step_ms": 0} == whole | {"step_ms": 0}
