"""Train a ResNet, with the rules of Goyal et al. 2017, arXiv:1706.02677, for large minibatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from recipes.resnet.data import IGNORE
from recipes.resnet.model import ResNet, parameter_groups
from recipes.resnet.schedule import Schedule, lr_factor

__all__ = ["ResNetModule", "parameter_groups"]


class ResNetModule(LightningModule):
    """A ResNet with its loss, accuracy, optimizer and schedule.

    The learning rate follows the minibatch over all ranks (linear scaling): ``optimizer``'s rate belongs to
    ``reference_batch`` images, and the warm-up leads from it to the scaled one, step by step. The rate is outside the
    momentum buffer in ``torch.optim``, so no momentum correction is due when it changes.

    Args:
        depth: layers of the network, 6n + 2.
        num_classes: classes of the data.
        in_channels: channels of the images.
        optimizer: makes the optimizer from parameter groups; None: SGD, lr 0.1, momentum 0.9, weight decay 1e-4.
        batch_size: images per rank and forward pass, to know the minibatch over all ranks.
        reference_batch: minibatch over all ranks that the optimizer's rate is meant for; None: do not scale.
        schedule: ``step`` (/10 at 50 % and 75 % of the steps), ``linear`` or ``cosine`` (both end at 0).
        warmup_epochs: length of the warm-up in epochs, at least 0.
        warmup_start: factor on the optimizer's rate at the first step; None: 1, so no warm-up where nothing is scaled.
        decay_norm: weight decay on batch norm and biases too.
        zero_gamma: start each block as the identity.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        depth: int = 20,
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        optimizer: Callable[..., Optimizer] | None = None,
        batch_size: int = 128,
        reference_batch: int | None = 128,
        schedule: Schedule = "step",
        warmup_epochs: float = 5.0,
        warmup_start: float | None = None,
        decay_norm: bool = False,
        zero_gamma: bool = True,
    ) -> None:
        super().__init__()
        if schedule not in get_args(Schedule):
            raise ValueError(f"recipe.schedule={schedule!r}: choose from {', '.join(get_args(Schedule))}")
        if warmup_epochs < 0:
            raise ValueError(f"recipe.warmup_epochs={warmup_epochs}: must be at least 0 (0: no warm-up)")
        if reference_batch is not None and reference_batch < 1:
            raise ValueError(f"recipe.reference_batch={reference_batch}: must be at least 1, or null not to scale lr")
        self.save_hyperparameters(ignore=["optimizer"], logger=False)
        self.make_optimizer = optimizer or partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
        self.model = ResNet(depth, num_classes, in_channels, zero_gamma=zero_gamma)
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()
        self.val_acc, self.test_acc = (
            MulticlassAccuracy(num_classes, average="micro", ignore_index=IGNORE) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] -> logits [N, num_classes]."""
        logits: Tensor = self.model(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of this rank's images; DDP's mean over ranks makes it the minibatch's."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val/loss`` and ``val/acc`` over the images of all ranks."""
        self._evaluate("val", self.val_loss, self.val_acc, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test/loss`` and ``test/acc`` over the images of all ranks."""
        self._evaluate("test", self.test_loss, self.test_acc, batch)

    def _evaluate(
        self, stage: str, loss: MeanMetric, accuracy: MulticlassAccuracy, batch: tuple[Tensor, Tensor]
    ) -> None:
        images, labels = batch
        logits = self(images)
        count = (labels != IGNORE).sum()  # the rest only makes the ranks' shares equal
        total = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        loss.update(total / count.clamp(min=1), weight=count)
        accuracy.update(logits, labels)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer over the groups of weight decay, and the schedule, advanced every step.

        Raises:
            ValueError: the run has no end, so that the schedule has no length.
        """
        self.trainer.fit_loop.setup_data()  # so that the length of an epoch is known
        total = self.trainer.estimated_stepping_batches
        if not math.isfinite(total) or total < 1:
            raise ValueError(f"{total} training steps: a schedule needs trainer.max_epochs or trainer.max_steps")
        accumulate = self.trainer.accumulate_grad_batches
        per_epoch = math.ceil(self.trainer.num_training_batches / accumulate)
        hp: Any = self.hparams
        minibatch = hp.batch_size * self.trainer.world_size * accumulate
        peak = minibatch / hp.reference_batch if hp.reference_batch else 1.0
        warmup = round(hp.warmup_epochs * per_epoch)
        factor = partial(
            lr_factor, total=int(total), schedule=hp.schedule, peak=peak, warmup=warmup, start=hp.warmup_start
        )
        if factor(0) != peak and warmup >= total:
            rank_zero_warn(f"the warm-up of {warmup} steps outlasts the run of {total}: lower recipe.warmup_epochs")
        optimizer = self.make_optimizer(parameter_groups(self.model, decay_norm=hp.decay_norm))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}
