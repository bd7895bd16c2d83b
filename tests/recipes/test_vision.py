"""Networks for images, their metrics, and predictions of a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image
from torch import nn

from recipes.resnet.data import IGNORE
from recipes.resnet.digits import Digits
from recipes.resnet.model import AlexNet, ImageNetResNet, ResNet
from recipes.resnet.module import AlexNetModule, ResNetModule
from tests.recipes.test_resnet import QUIET, pytestmark  # noqa: F401


@pytest.mark.parametrize(
    ("depth", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)]
)
def test_sizes_of_the_imagenet_form(depth: int, count: int) -> None:
    with torch.device("meta"):
        model = ImageNetResNet(depth)
    assert sum(p.numel() for p in model.parameters()) == count
    convs = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "short" not in name]
    assert len(convs) == depth


@pytest.mark.parametrize(("depth", "width"), [(18, 512), (50, 2048)])
def test_stages_of_the_imagenet_form(depth: int, width: int) -> None:
    model, sizes = ImageNetResNet(depth, 7, zero_gamma=True).eval(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape[1:])))
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
    assert [size[1] for size in dict.fromkeys(sizes)] == [16, 8, 4, 2]
    assert sizes[-1][0] == width
    x = torch.rand(2, width, 4, 4)
    assert torch.equal(model.blocks[-1](x), x)  # zero gamma: a block is its shortcut


@pytest.mark.parametrize(("size", "classes", "count"), [(224, 1000, 61_100_840), (32, 10, 23_468_874)])
def test_sizes_of_alexnet(size: int, classes: int, count: int) -> None:
    model = AlexNet(classes, image_size=size)
    assert sum(p.numel() for p in model.parameters()) == count
    linear = sum(p.numel() for p in model.classifier.parameters())
    assert linear > 0.89 * count
    assert model.eval()(torch.zeros(2, 3, size, size)).shape == (2, classes)


@pytest.mark.parametrize("size", [8, 28, 48, 64, 96])
def test_alexnet_takes_other_sizes(size: int) -> None:
    assert AlexNet(3, 1, size, hidden=16)(torch.zeros(2, 1, size, size)).shape == (2, 3)


@pytest.mark.parametrize(
    ("settings", "network"),
    [
        ({}, ResNet),
        ({"image_size": 64}, ImageNetResNet),
        ({"image_size": 64, "form": "cifar"}, ResNet),
        ({"form": "imagenet", "depth": 18}, ImageNetResNet),
    ],
)
def test_form_follows_the_images(settings: dict[str, Any], network: type) -> None:
    assert type(ResNetModule(**settings).model) is network


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ResNetModule(20, image_size=224), "depth=20: the ImageNet form has 18, 34, 50, 101, 152"),
        (lambda: ResNetModule(form="large"), "recipe.form='large': choose from auto, cifar, imagenet"),
        (lambda: AlexNetModule(image_size=7), "image_size=7: AlexNet needs images of at least 8 pixels"),
        (lambda: AlexNetModule(hidden=0), "recipe.hidden=0: must be at least 1"),
        (lambda: AlexNetModule(dropout=1.0), r"recipe.dropout=1.0: must be in \[0, 1\)"),
        (lambda: AlexNetModule(schedule="often"), "recipe.schedule='often'"),
    ],
)
def test_wrong_settings_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_top_5_counts_every_image_once() -> None:
    module = ResNetModule(8, num_classes=10, in_channels=1)
    logits, labels = torch.randn(40, 10), torch.randint(10, (40,))
    labels[-3:] = IGNORE
    for rows in (slice(0, 25), slice(25, 40)):
        for metric in module.test_metrics.values():
            metric.update(logits[rows], labels[rows])
    real = logits[:37].topk(5).indices == labels[:37, None]
    assert module.test_metrics["top5"].compute().item() == pytest.approx(real.any(1).float().mean().item())
    assert module.test_metrics["acc"].compute().item() == pytest.approx(real[:, 0].float().mean().item())
    assert "top5" not in ResNetModule(8, num_classes=5).test_metrics


def test_predicts_a_picture_from_a_checkpoint(tmp_path: Path) -> None:
    data = Digits(batch_size=64)
    torch.manual_seed(0)
    module = ResNetModule(8, batch_size=64, schedule="linear", warmup_epochs=0, **data.dims)
    trainer = Trainer(max_epochs=4, **QUIET)
    trainer.fit(module, datamodule=data)
    metrics = trainer.test(module, datamodule=data, verbose=False)[0]
    assert 0.5 < metrics["test/acc"] < metrics["test/top5"] <= 1
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = ResNetModule.load_from_checkpoint(tmp_path / "last.ckpt", optimizer=None, weights_only=True)
    assert again.facts["classes"] == list("0123456789")

    image = data.splits["test"].images[0]
    Image.fromarray((image[0].numpy() * 15.9375).astype(np.uint8)).resize((80, 80), 0).save(tmp_path / "large.png")
    answer = again.predict_file(str(tmp_path / "large.png"))
    module.eval()
    shares = module((image.float() - data.mean[:, None, None])[None] / data.std).softmax(1)
    name, share, percent, *_ = answer.replace(",", "").split()
    assert percent == "%"
    assert name == str(shares.argmax().item())
    assert float(share) == pytest.approx(100 * shares.max().item(), abs=15)  # 8 x 8 out of 80 x 80
    assert answer.count("%") == 3

    (tmp_path / "broken.png").write_bytes((tmp_path / "large.png").read_bytes()[:60])
    for path, words in (("broken.png", "no whole picture"), ("absent.png", "no such file"), (".", "no whole picture")):
        with pytest.raises(ValueError, match=words) as info:
            again.predict_file(str(tmp_path / path))
        assert "\n" not in str(info.value)


def test_prediction_needs_facts() -> None:
    with pytest.raises(ValueError, match="load a checkpoint"):
        ResNetModule(8).predict_file("any.png")
