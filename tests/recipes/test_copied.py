"""What a user copies, a recipe's folder with the two shared modules beside it, trains elsewhere."""

import os
import shutil

import pytest

from tests.config.composing import ROOT
from tests.helpers import forked

SCRIPT = """
import sys
others = ("hydra", "omegaconf", "wandb", "recipes")
known = [name for name in sys.modules if name.split(".")[0] in others]
sys.modules.update(dict.fromkeys([*others, *known]))  # importing one of them fails
import lightning.pytorch as pl
from lightning_compress import CompressedDDPStrategy
from mine.{data} import {Data}
from mine.{module} import {Module}

if __name__ == "__main__":
    data = {Data}({small})
    strategy = CompressedDDPStrategy(compressor="topk", process_group_backend="gloo", start_method="fork")
    options = dict(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = pl.Trainer(strategy=strategy, max_steps=3, limit_val_batches=0, enable_model_summary=False, **options)
    trainer.fit({Module}(**data.dims, {size}), datamodule=data)
"""


@pytest.mark.parametrize(
    ("recipe", "data", "small", "module", "size"),
    [
        ("resnet", "digits.Digits", "", "module.ResNetModule", "depth=8"),
        (
            *("lstm_speech", "spoken.Spoken", "train_size=64, val_size=2, test_size=2", "module.SpeechModule"),
            "layers=1, hidden=32",
        ),
        (
            *("nmt", "numbers.Numbers", "vocab_size=150, train_size=200, val_size=10, test_size=10"),
            *("module.TranslationModule", "width=64, hidden=128, layers=1, heads=2"),
        ),
    ],
)
def test_a_copied_folder_trains(tmp_path, recipe, data, small, module, size):
    shutil.copytree(ROOT / "recipes" / recipe, tmp_path / "mine" / recipe)
    for shared in ("task.py", "loading.py"):
        shutil.copy(ROOT / "recipes" / shared, tmp_path / "mine")
    (where, kind), (what, model) = data.split("."), module.split(".")
    names = {"data": f"{recipe}.{where}", "Data": kind, "module": f"{recipe}.{what}", "Module": model}
    names |= {"small": small, "size": size}
    (tmp_path / "train.py").write_text(SCRIPT.format(**names))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}
    done = forked.run("train.py", cwd=tmp_path, env=environment)
    assert "`Trainer.fit` stopped: `max_steps=3` reached." in done.stderr, done.stderr[-3000:]
