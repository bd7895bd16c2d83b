"""The network and its training rules against the papers' numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn

from recipes.resnet.data import IGNORE, Split
from recipes.resnet.digits import Digits
from recipes.resnet.model import BasicBlock, ResNet
from recipes.resnet.module import ResNetModule
from recipes.task import lr_factor, parameter_groups

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


@pytest.mark.parametrize(
    ("depth", "millions", "count"),
    [(20, 0.27, 269_722), (32, 0.46, 464_154), (56, 0.85, 853_018), (110, 1.7, 1_727_962)],
)
def test_sizes_of_the_paper(depth: int, millions: float, count: int) -> None:
    model = ResNet(depth)
    assert sum(p.numel() for p in model.parameters()) == count
    assert count / 1e6 == pytest.approx(millions, abs=0.03)
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == depth


def test_stages_halve_the_image() -> None:
    model, shapes = ResNet(20), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


@pytest.mark.parametrize("depth", [2, 18, 21])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth={depth}.*6n"):
        ResNet(depth)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = ResNet(20)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 9000:
            fan_in = module.weight[0].numel()
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.03)
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
    assert (model.fc.bias == 0).all()


def test_zero_gamma_makes_each_block_its_shortcut() -> None:
    block = ResNet(20, zero_gamma=True).blocks[3]
    assert isinstance(block, BasicBlock)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert not out[:, 16:].any()


def test_lr_of_the_paper() -> None:
    steps = [0, 31_999, 32_000, 47_999, 48_000, 63_999]
    assert [0.1 * lr_factor(t, 64_000) for t in steps] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_lr_by_hand() -> None:
    settings: dict[str, Any] = {"total": 8, "peak": 4.0, "warmup": 2}
    trace = {name: [lr_factor(t, schedule=name, **settings) for t in range(9)] for name in ("step", "linear", "cosine")}
    assert trace["step"] == pytest.approx([1, 2.5, 4, 4, 0.4, 0.4, 0.04, 0.04, 0.04])
    assert trace["linear"] == pytest.approx([1, 2.5, 4, 10 / 3, 8 / 3, 2, 4 / 3, 2 / 3, 0])
    assert trace["cosine"][5] == pytest.approx(2)
    assert trace["cosine"][8] == pytest.approx(0)
    assert lr_factor(1, 8, peak=0.5, warmup=4) == 0.5  # a small minibatch is not warmed down
    assert lr_factor(6, 8, schedule="linear", warmup=9) == 0.25  # nothing to warm up: the schedule starts at once
    assert lr_factor(1, 8, warmup=2, start=0.0) == 0.5


class Trace(Callback):
    """The learning rate of every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_lr_in_a_run_scales_with_the_minibatch() -> None:
    trace = Trace()
    data = Digits(batch_size=64, train_size=256)
    module = ResNetModule(8, in_channels=1, batch_size=64, reference_batch=32, warmup_epochs=0.5)
    trainer = Trainer(max_epochs=2, callbacks=[trace], accumulate_grad_batches=2, **QUIET)
    trainer.fit(module, datamodule=data)
    assert trace.rates == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.04, 0.04, 0.004, 0.004])


def test_only_weights_decay() -> None:
    model = ResNet(8)
    decayed, spared = parameter_groups(model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert "weight_decay" not in decayed
    assert spared["weight_decay"] == 0
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    for p in spared["params"]:
        assert "bn" in names[id(p)] or names[id(p)].endswith("bias")
    for p in decayed["params"]:
        assert "conv" in names[id(p)] or names[id(p)] == "fc.weight"
    assert len(parameter_groups(model, decay_norm=True)) == 1


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("stage", ["validation", "test"])
def test_a_loss_that_is_no_number_is_not_left_out(stage: str) -> None:
    model = ResNetModule(depth=8, num_classes=10)
    images = torch.randn(4, 3, 32, 32)
    for bad in (False, True):
        getattr(model, f"{stage}_step")((images * (math.nan if bad else 1.0), torch.arange(4)), 0)
    assert math.isinf(model.val_loss.compute() if stage == "validation" else model.test_loss.compute())


def test_mean_of_the_ranks_is_the_minibatch() -> None:
    torch.manual_seed(0)
    module = ResNetModule(8, in_channels=1).eval()  # batch norm off
    images, labels = torch.randn(12, 1, 8, 8), torch.randint(10, (12,))

    def gradient(rows: slice) -> torch.Tensor:
        loss = F.cross_entropy(module(images[rows]), labels[rows])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.model.parameters()))])

    shares = torch.stack([gradient(slice(i, i + 4)) for i in (0, 4, 8)]).mean(0)
    torch.testing.assert_close(shares, gradient(slice(0, 12)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 7])
def test_accuracy_counts_every_image_once(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything(0, verbose=False)
    monkeypatch.setattr(Digits, "_ranks", ranks)  # pads 360 images to 364
    data = Digits(batch_size=25)
    module = ResNetModule(8, in_channels=1)
    trainer = Trainer(**QUIET)
    result = trainer.test(module, datamodule=data, verbose=False)[0]
    test: Split = data.splits["test"]
    assert len(test.labels) == 360
    with torch.no_grad():
        logits = module.eval()((test.images - data.mean) / data.std)
    assert (data.test_dataloader().dataset.split.labels == IGNORE).sum() == -360 % ranks
    assert result["test/acc"] == pytest.approx((logits.argmax(1) == test.labels).float().mean().item())
    assert result["test/loss"] == pytest.approx(F.cross_entropy(logits, test.labels).item(), rel=1e-4)


def test_depth_and_validation_of_nothing_are_not_the_default() -> None:
    with pytest.raises(ValueError, match="depth=0"):
        ResNetModule(0)
    with pytest.raises(ValueError, match=r"data.val_size=5, .* val 0 or at least 10"):
        Digits(val_size=5)


@pytest.mark.parametrize("wrong", [{"schedule": "polynomial"}, {"warmup_epochs": -1}, {"reference_batch": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    ((key, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{key}='?{value}"):
        ResNetModule(8, **wrong)


def test_inverse_sqrt_falls_from_the_end_of_the_warm_up_also_without_a_ramp() -> None:
    factors = [lr_factor(step, 1000, schedule="inverse_sqrt", warmup=200) for step in (0, 200, 800)]
    assert factors == pytest.approx([1.0, 1.0, 0.5])
