"""A small real training job that runs inside a rank of a pool."""

import inspect
import warnings
from functools import cache, partial
from importlib.metadata import version

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import CompressedDDPStrategy

LATER = pytest.mark.skipif(version("lightning").startswith("2.5."), reason="what Lightning has from 2.6 on")
"""For tests of it."""


class Net(pl.LightningModule):
    """Convolution, batch norm and linear layers, large enough to be compressed."""

    def __init__(self, optimizer="sgd"):
        super().__init__()
        self.optimizer = optimizer
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 1e-3)
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def digits(seed=0, count=960):
    """Images ``[count, 1, 8, 8]`` and labels of real handwritten digits, in a random order."""
    images, labels = _raw()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:count]
    return TensorDataset(images[order, None] / 8 - 1, labels[order])


@cache
def _raw():
    """All images, as they are stored, and labels: reading them takes longer than a few steps."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32), torch.tensor(data.target)


def loader(dataset, batch=16):
    """Every rank its own share; the Trainer puts the distributed sampler in."""
    return DataLoader(dataset, batch, drop_last=True)


class FindsInBetween(LearningRateFinder):
    """Looks for a learning rate before the second epoch, and keeps the old one.

    ``seen`` is what ``look(trainer, module)`` returned before and after.
    """

    def __init__(self, look):
        super().__init__(1e-5, 1e-1, 6, early_stop_threshold=None, update_attr=False)
        self.look, self.seen = look, []

    def on_fit_start(self, trainer, module):
        pass

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1 and not self.seen:
            self.seen.append(self.look(trainer, module))
            self.lr_find(trainer, module)
            self.seen.append(self.look(trainer, module))


def saving_on_exception(folder):
    """A callback that saves ``stopped.ckpt`` on an exception, and at no other time."""
    if "save_on_exception" in inspect.signature(ModelCheckpoint).parameters:  # from Lightning 2.6 on
        return ModelCheckpoint(folder, "stopped", save_on_exception=True, every_n_epochs=100)
    return OnExceptionCheckpoint(folder, "stopped")


def quiet_trainer(strategy, **options):
    """A Trainer over the ranks of a pool that says nothing and saves nothing, unless it is told to."""
    defaults = {"accelerator": "cpu", "devices": dist.get_world_size(), "logger": False, "enable_checkpointing": False}
    defaults |= {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def fit(strategy, steps=10, make=Net, callbacks=(), seed=1, loggers=False, quiet=True, **trainer):
    """Train on this rank; returns the trainer and the model."""
    torch.manual_seed(seed)
    model = make()
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        options = {"max_steps": steps, "max_epochs": 100, "logger": loggers, "callbacks": list(callbacks), **trainer}
        fitted = quiet_trainer(strategy, **options)
        fitted.fit(model, loader(digits()))
    return fitted, model


def parameters(model):
    """All parameters in one vector, on no graph."""
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def train(compressor, steps=10, optimizer="sgd", trainer=None, **strategy):
    """Train with a compressor on this rank; parameters and traffic."""
    chosen = CompressedDDPStrategy(compressor, **strategy)
    _, model = fit(chosen, steps, partial(Net, optimizer), **(trainer or {}))
    return parameters(model).numpy(), chosen.comm_stats()
