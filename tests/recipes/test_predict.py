"""Answers of a checkpoint, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from recipes import predict
from recipes.resnet.digits import Digits
from recipes.resnet.module import ResNetModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a ResNet-8 after one step on digits."""
    data = Digits(batch_size=32)
    model = ResNetModule(depth=8, **data.dims, warmup_epochs=0.0)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    path = tmp_path_factory.mktemp("run") / "last.ckpt"
    trainer.save_checkpoint(path)
    return path


def picture(path: Path) -> Path:
    from PIL import Image

    Image.new("L", (8, 8), 128).save(path)
    return path


def test_answers(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = [str(picture(tmp_path / f"{name}.png")) for name in "ab"]
    assert predict.main([str(checkpoint), *images]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == images
    assert len({line.split(": ")[1] for line in lines}) == 1


@pytest.mark.parametrize("wrong", ["other", "none", "garbage", "tensor", "input"])
def test_one_line_for_what_is_wrong(
    wrong: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "garbage").write_text("no checkpoint")
    torch.save({"a": torch.zeros(1)}, tmp_path / "tensor")
    missing = str(tmp_path / "none.png")
    words, said = {
        "other": ([str(checkpoint), missing, "--recipe", "nmt"], "is of recipe=resnet, not of recipe=nmt"),
        "none": ([str(tmp_path / "none"), missing], "there is no such file"),
        "garbage": ([str(tmp_path / "garbage"), missing], "cannot be read"),
        "tensor": ([str(tmp_path / "tensor"), missing], "does not say its recipe"),
        "input": ([str(checkpoint), missing], missing),
    }[wrong]
    assert predict.main(words) == 1
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
