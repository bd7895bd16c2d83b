"""Train a ResNet, with the rules of Goyal et al. 2017, arXiv:1706.02677, for large minibatches."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from recipes.resnet.data import IGNORE
from recipes.resnet.model import ResNet
from recipes.schedule import Schedule
from recipes.task import Score, Task

__all__ = ["ResNetModule"]


class ResNetModule(Task):
    """A ResNet with its loss and accuracy.

    Args:
        depth: layers of the network, 6n + 2.
        num_classes: classes of the data.
        in_channels: channels of the images.
        optimizer: see :class:`~recipes.task.Task`, as all that is not named here.
        batch_size: images per rank and forward pass.
        reference_batch: minibatch over all ranks that the optimizer's rate is meant for; None: do not scale.
        schedule: ``step``, ``linear``, ``cosine``, ``constant`` or ``inverse_sqrt``.
        warmup_epochs: length of the warm-up in epochs, at least 0.
        warmup_start: factor on the optimizer's rate at the first step.
        decay_norm: weight decay on batch norm and biases too.
        zero_gamma: start each block as the identity.

    Raises:
        ValueError: a value is out of its range.
    """

    recipe = "resnet"
    score = Score("test/acc", "accuracy", "maximize")

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
        super().__init__(
            optimizer=optimizer,
            schedule=schedule,
            warmup_epochs=warmup_epochs,
            warmup_start=warmup_start,
            batch_size=batch_size,
            reference_batch=reference_batch,
            decay_norm=decay_norm,
        )
        self.save_hyperparameters(ignore=["optimizer"], logger=False)
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

    def predict_file(self, source: str) -> str:
        """See ``Task.predict_file``."""
        raise NotImplementedError
