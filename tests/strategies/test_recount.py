"""BatchNorm's statistics in the model that is evaluated and saved, where an outer optimizer makes it."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchmetrics import Accuracy

from lightning_compress import LocalSGDStrategy
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer
from tests.strategies.test_periodic import fit

KINDS = {
    "diloco": {"sync_every": 8, "outer": "nesterov"},
    "streaming": {"sync_every": 8, "fragments": 3, "delay": 2, "outer": "nesterov"},
}


class Normed(Net):
    """Three layers of BatchNorm; and all that a training_step may do besides."""

    def __init__(self, _):
        super().__init__("sgd")
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(
            nn.Linear(1024, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.teacher = nn.Parameter(torch.zeros(10), requires_grad=False)
        self.accuracy = Accuracy("multiclass", num_classes=10)
        self.losses, self.count, self.held, self.stages = [], 0, [], set()

    def training_step(self, batch, batch_idx):
        images, labels = batch.pop(0), batch.pop(0)  # which another call must find in it, too
        found = self(images)
        loss = nn.functional.cross_entropy(found, labels)
        self.accuracy(found, labels)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log_dict({"loss": loss})
        self.losses.append(loss.item())
        self.count += 1 + 0 * random.randrange(5) + 0 * np.random.randint(5)
        self.calls += 1
        with torch.no_grad():
            self.teacher.lerp_(self.head[-1].bias, 0.1)
        self.stages.add(self.trainer.training)
        return loss

    def on_validation_epoch_start(self):
        self.held.append([held_out(self), held_out(fresh(self))])

    def validation_step(self, batch, batch_idx):
        pass


@torch.no_grad()
def held_out(model):
    images, labels = digits(0, 1700)[960:]
    mode = model.training
    loss = nn.functional.cross_entropy(model.eval()(images), labels).item()
    model.train(mode)
    return loss


@torch.no_grad()
def fresh(model):
    """The same weights with statistics of all data."""
    made = Normed("sgd")
    made.load_state_dict(model.state_dict())
    for each in made.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.reset_running_stats()
            each.momentum = None
    made(digits()[:][0])
    return made


AS_AVERAGED = {"*.running_*": "mean"}
"""What a user names is what runs."""


def _loss(kind, folder, buffers=None):
    saves = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    options = {"max_epochs": 2, "limit_train_batches": 16, "callbacks": saves}
    _, model = fit(LocalSGDStrategy(**KINDS[kind], buffers=buffers), Normed, **options)
    saved = Normed("sgd")
    saved.load_state_dict(torch.load(f"{folder}/epoch=1.ckpt", weights_only=True)["state_dict"])
    held = [*model.held[1:], *([held_out(each), held_out(fresh(each))] for each in (saved, model))]
    return held, {name: each.numpy() for name, each in model.named_buffers()}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_evaluated_and_saved_has_statistics_of_its_own(pools, tmp_path, kind, size):
    ranks = pools[size].run(_loss, kind, str(tmp_path))
    for held, buffers in ranks:
        assert all(own < 1.1 * best for own, best in held)
        assert all(np.array_equal(each, ranks[0][1][name]) for name, each in buffers.items())


def _trains(buffers=None):
    strategy = LocalSGDStrategy(**KINDS["diloco"], compressor="none", buffers=buffers)
    trainer, model = fit(strategy, Normed, max_epochs=2, limit_train_batches=12)
    done = model.losses, model.count, model.calls.item(), model.stages
    logged = {name: each.item() for name, each in trainer.callback_metrics.items()}
    attributes = set(vars(model)), [each.momentum for each in model.modules() if hasattr(each, "momentum")]
    return parameters(model).numpy(), done, logged, attributes, model.held


@pytest.mark.parametrize("size", [2, 3])
def test_passes_that_count_leave_nothing_else_behind(pools, size):
    """Dropout's random numbers, lists, counters, metrics, logs; and the statistics that a user names."""
    for (counted, *others, held), (as_named, *same, averaged) in zip(
        pools[size].run(_trains), pools[size].run(_trains, AS_AVERAGED), strict=True
    ):
        assert np.array_equal(counted, as_named)
        assert others == same
        assert others[0][1:3] == (24, 24)
        assert others[0][-1] == {True}
        assert held[-1][1] == averaged[-1][1]
        assert held[-1][0] < averaged[-1][0]


class Manual(Normed):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class Raises(Normed):
    """Where no gradient can be taken, on rank 1."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if dist.get_rank() == 1:
            torch.autograd.grad(loss, self.head[0].weight, retain_graph=True)
        return loss


def _warned(made, options):
    torch.manual_seed(1)
    said = []
    trainer = quiet_trainer(LocalSGDStrategy(**{**KINDS["diloco"], **options}), max_steps=10)
    model = made("sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader(digits()))
        said = [str(each.message) for each in caught if "BatchNorm's statistics" in str(each.message)]
    return said, model.count, parameters(model).numpy()


@pytest.mark.parametrize(
    ("made", "options", "why"),
    [
        (Manual, {}, "manual optimization"),
        (Raises, {}, "rank 1: training_step raised"),
        (Normed, {"outer": "average"}, ""),
        (Normed, {"buffers": AS_AVERAGED}, ""),
    ],
)
def test_where_they_cannot_be_counted_a_warning_says_why(pools, made, options, why):
    ranks = pools[2].run(_warned, made, options)
    said = ranks[0][0]
    assert (why in said[0] and "outer='average'" in said[0]) if why else not said
    assert np.array_equal(ranks[0][2], ranks[1][2])
