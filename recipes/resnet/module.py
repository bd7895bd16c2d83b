"""Train a network to classify images, with the rules of Goyal et al. 2017, arXiv:1706.02677, for large minibatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from ..task import Schedule, Score, Task
from .data import IGNORE
from .model import AlexNet, ImageNetResNet, ResNet
from .pictures import ready

__all__ = ["AlexNetModule", "Classifier", "Form", "ResNetModule"]

Form = Literal["auto", "cifar", "imagenet"]
LARGE = 64
"""Pixels a side from which ``form=auto`` takes the ImageNet form."""
SHOWN = 3
"""Classes that a prediction names."""


class Classifier(Task):
    """A network with its loss, its accuracy, and its top-5 accuracy where there are more than five classes.

    Args:
        model: images [N, C, H, W] -> logits [N, num_classes].
        num_classes: classes of the data.
        **settings: see :class:`~recipes.task.Task`.
    """

    score = Score("test/acc", "accuracy", "maximize")

    def __init__(self, model: nn.Module, num_classes: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.model = model
        self.val_loss, self.test_loss = MeanMetric(nan_strategy=math.inf), MeanMetric(nan_strategy=math.inf)
        tops = {"acc": 1} | ({"top5": 5} if num_classes > 5 else {})
        self.val_metrics, self.test_metrics = (
            nn.ModuleDict(
                {
                    name: MulticlassAccuracy(num_classes, top_k=k, average="micro", ignore_index=IGNORE)
                    for name, k in tops.items()
                }
            )
            for _ in range(2)
        )

    def configure_model(self) -> None:
        """Shard the network over the mesh of a strategy that has one: its layers with weights, then what is left."""
        if self.device_mesh is None:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard  # takes seconds

        if isinstance(self.model, FSDPModule):
            return
        for layer in self.model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] -> logits [N, num_classes]."""
        logits: Tensor = self.model(x.to(self.dtype))  # with bf16-true and 64-true, parameters are not float32
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of this rank's images; DDP's mean over ranks makes it the minibatch's."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val/loss``, ``val/acc`` and ``val/top5`` over the images of all ranks."""
        self._evaluate("val", self.val_loss, self.val_metrics, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test/loss``, ``test/acc`` and ``test/top5`` over the images of all ranks."""
        self._evaluate("test", self.test_loss, self.test_metrics, batch)

    def _evaluate(self, stage: str, loss: MeanMetric, metrics: nn.ModuleDict, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        count = (labels != IGNORE).sum()  # the rest only makes the ranks' shares equal
        total = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        loss.update(total / count.clamp(min=1), weight=count)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        for name, metric in metrics.items():
            metric.update(logits, labels)  # type: ignore[operator]
            self.log(f"{stage}/{name}", cast(Metric, metric), on_step=False, on_epoch=True, prog_bar=name == "acc")

    @torch.no_grad()
    def predict_file(self, source: str) -> str:
        """The likeliest classes of a picture, such as ``cat 81.3 %, dog 12.0 %, fox 3.1 %``.

        Args:
            source: path of a picture in any size and format that Pillow reads.

        Raises:
            ValueError: it is not a whole picture, or the module has not seen its data's facts (names of classes, mean
                and deviation), which come with a checkpoint.
        """
        if not self.facts:
            raise ValueError("this model does not know its data: load a checkpoint that recipes.train has written")
        self.eval()
        shares = self(ready(Path(source), self.facts).to(self.device))[0].softmax(0)
        best = shares.topk(min(SHOWN, len(shares)))
        names = [self.facts["classes"][row] for row in best.indices.tolist()]
        return ", ".join(f"{name} {100 * share:.1f} %" for name, share in zip(names, best.values.tolist(), strict=True))


class ResNetModule(Classifier):
    """A ResNet, in the CIFAR form or in the ImageNet form.

    Args:
        depth: layers of the network: 6n + 2 in the CIFAR form, 18, 34, 50, 101 or 152 in the ImageNet form; None: 20
            or 50.
        num_classes: classes of the data.
        in_channels: channels of the images.
        image_size: height and width of the images.
        form: ``cifar``, ``imagenet``, or ``auto``: the latter from 64 pixels on.
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

    def __init__(
        self,
        depth: int | None = None,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        *,
        form: Form = "auto",
        optimizer: Callable[..., Optimizer] | None = None,
        batch_size: int = 128,
        reference_batch: int | None = 128,
        schedule: Schedule = "step",
        warmup_epochs: float = 5.0,
        warmup_start: float | None = None,
        decay_norm: bool = False,
        zero_gamma: bool = True,
    ) -> None:
        if form not in get_args(Form):
            raise ValueError(f"recipe.form={form!r}: choose from {', '.join(get_args(Form))}")
        large = form == "imagenet" or (form == "auto" and image_size >= LARGE)
        network, standard = (ImageNetResNet, 50) if large else (ResNet, 20)
        super().__init__(
            network(standard if depth is None else depth, num_classes, in_channels, zero_gamma=zero_gamma),
            num_classes,
            optimizer=optimizer,
            schedule=schedule,
            warmup_epochs=warmup_epochs,
            warmup_start=warmup_start,
            batch_size=batch_size,
            reference_batch=reference_batch,
            decay_norm=decay_norm,
        )
        self.save_hyperparameters(ignore=["optimizer"], logger=False)


class AlexNetModule(Classifier):
    """AlexNet, in the 224 form or for small images.

    Args:
        num_classes: classes of the data.
        in_channels: channels of the images.
        image_size: height and width of the images, at least 8.
        hidden: units of the two hidden linear layers.
        dropout: share of their inputs that is dropped in training, in [0, 1).
        **settings: see :class:`~recipes.task.Task`.

    Raises:
        ValueError: a value is out of its range.
    """

    recipe = "alexnet"

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        *,
        hidden: int = 4096,
        dropout: float = 0.5,
        **settings: Any,
    ) -> None:
        super().__init__(
            AlexNet(num_classes, in_channels, image_size, hidden=hidden, dropout=dropout), num_classes, **settings
        )
        self.save_hyperparameters(ignore=["optimizer"], logger=False)
