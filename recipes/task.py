"""What every recipe's module shares: its score, its optimizer and learning rates, and predictions from a checkpoint."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_compress import MinibatchSize
from lightning_compress.contrib.pruning import shrink

from .loading import own_seed

__all__ = ["Schedule", "Score", "Task", "lr_factor", "parameter_groups"]

Schedule = Literal["constant", "step", "linear", "cosine", "inverse_sqrt"]


def lr_factor(
    step: int,
    total: int,
    *,
    schedule: Schedule = "step",
    peak: float = 1.0,
    warmup: int = 0,
    start: float | None = None,
) -> float:
    """Factor on the base learning rate for one optimizer step.

    The first ``warmup`` steps go linearly from ``start`` to ``peak`` (Goyal et al. 2017: from the rate of one worker's
    minibatch to the scaled one). Then ``step`` divides by 10 at 50 % and at 75 % of ``total`` (He et al. 2015: 32k and
    48k of 64k iterations); ``linear`` and ``cosine`` fall to 0 at ``total``; ``inverse_sqrt`` falls as
    1 / sqrt(step) (Vaswani et al. 2017, section 5.3).

    Args:
        step: optimizer steps done so far, from 0.
        total: optimizer steps of the whole run, at least 1.
        schedule: what follows the warm-up.
        peak: factor after the warm-up, the minibatch over the reference minibatch.
        warmup: length of the warm-up in steps; there is none where it would start at ``peak``.
        start: factor at step 0; None: 1, or ``peak`` where that is less.

    Returns:
        The factor, at least 0.

    Raises:
        ValueError: there is no such schedule.
    """
    first = min(1.0, peak) if start is None else start
    if (
        schedule != "inverse_sqrt" and first == peak
    ):  # which falls from the end of the warm-up, whatever that began with
        warmup = 0
    if step < warmup:
        return first + (peak - first) * step / warmup
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return peak * math.sqrt(max(1, warmup) / max(1, warmup, step))
    left = max(0.0, (total - step) / max(1, total - warmup))
    if schedule == "step":
        return peak * 0.1 ** ((2 * step >= total) + (4 * step >= 3 * total))
    if schedule == "linear":
        return peak * left
    if schedule == "cosine":
        return peak * (1 - math.cos(math.pi * left)) / 2
    raise ValueError(f"schedule={schedule!r}: choose from {', '.join(get_args(Schedule))}")


class Score(NamedTuple):
    """The figure by which a recipe is judged, as its test loop logs it."""

    metric: str
    """Name of the logged metric, such as ``test/acc``."""
    label: str
    """What people call it, such as ``accuracy``."""
    goal: Literal["maximize", "minimize"]
    scale: float = 100.0
    """Factor from the logged value to the printed one."""
    unit: str = " %"

    def written(self, value: float) -> str:
        """``value`` as it is printed: ``97.22 %``."""
        return f"{self.scale * value:.2f}{self.unit}"

    def cost(self, value: float) -> float:
        """``value`` as Hydra's sweepers want it, all of which minimise unless told otherwise: less is better."""
        return -value if self.goal == "maximize" else value


class Task(LightningModule, ABC):
    """A model with its loss, its score, its optimizer and its learning rates.

    The learning rate follows the minibatch over all ranks (linear scaling, Goyal et al. 2017): ``optimizer``'s rate
    belongs to ``reference_batch`` examples. The rate is outside the momentum buffer in ``torch.optim``, so no momentum
    correction is due when it changes.

    Args:
        optimizer: makes the optimizer from parameter groups; None: SGD, lr 0.1, momentum 0.9, weight decay 1e-4.
        schedule: what follows the warm-up: ``constant``, ``step`` (/10 at 50 % and 75 % of the steps), ``linear`` or
            ``cosine`` (both end at 0), ``inverse_sqrt``.
        warmup_epochs: length of the warm-up in epochs, at least 0.
        warmup_steps: its length in optimizer steps instead; None: ``warmup_epochs`` says it.
        warmup_start: factor on the optimizer's rate at the first step; None: 1, so no warm-up where nothing is scaled.
        batch_size: examples per rank and forward pass, to know the minibatch over all ranks.
        reference_batch: minibatch over all ranks that the optimizer's rate is meant for; None: do not scale.
        decay_norm: weight decay on norms and biases too.

    Raises:
        ValueError: a value is out of its range.
    """

    recipe: ClassVar[str]
    """Name of the Hydra option, which a checkpoint knows its recipe by."""
    score: ClassVar[Score]
    model: nn.Module
    facts: dict[str, Any]
    """What prediction needs to know of the data: names of classes, mean and deviation, a vocabulary."""

    def __init__(
        self,
        *,
        optimizer: Callable[..., Optimizer] | None = None,
        schedule: Schedule = "step",
        warmup_epochs: float = 0.0,
        warmup_steps: int | None = None,
        warmup_start: float | None = None,
        batch_size: int = 1,
        reference_batch: int | None = None,
        decay_norm: bool = False,
    ) -> None:
        super().__init__()
        if schedule not in get_args(Schedule):
            raise ValueError(f"recipe.schedule={schedule!r}: choose from {', '.join(get_args(Schedule))}")
        if warmup_epochs < 0:
            raise ValueError(f"recipe.warmup_epochs={warmup_epochs}: must be at least 0 (0: no warm-up)")
        if warmup_steps is not None and warmup_steps < 0:
            raise ValueError(f"recipe.warmup_steps={warmup_steps}: must be at least 0, or null for warmup_epochs")
        if warmup_steps is not None and warmup_epochs > 0:
            raise ValueError(
                f"recipe.warmup_steps={warmup_steps}, recipe.warmup_epochs={warmup_epochs}: both say how long the "
                "warm-up is; set recipe.warmup_steps=null, or recipe.warmup_epochs=0"
            )
        if reference_batch is not None and reference_batch < 1:
            raise ValueError(f"recipe.reference_batch={reference_batch}: must be at least 1, or null not to scale lr")
        self.make_optimizer = optimizer or partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
        self.factor = partial(lr_factor, schedule=schedule, start=warmup_start)
        self.warmup = warmup_epochs, warmup_steps
        self.batch = batch_size, reference_batch
        self.decay_norm = decay_norm
        self.facts = {}

    @abstractmethod
    def predict_file(self, source: str) -> str:
        """The model's answer to one input of the user's own.

        Args:
            source: path of an image or a wav, or a sentence.

        Raises:
            ValueError: ``source`` cannot be read or is not what this recipe takes.
        """

    def on_train_start(self) -> None:
        """Let every rank drop other units than the others, and a run that goes on see what it would have seen."""
        self.rank_seed = own_seed(torch.initial_seed(), self.global_rank)
        go_on_reading(self.trainer)

    def on_train_epoch_start(self) -> None:
        """Tell the sampler the epoch: with max_steps, Lightning counts one more when a run goes on."""
        loop: Any = self.trainer.fit_loop
        for loader in loop._combined_loader.flattened:
            _set_sampler_epoch(loader, self.current_epoch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Draw what is dropped from rank, epoch and batch alone, so that a run that goes on draws the same."""
        seed = own_seed(own_seed(self.rank_seed, self.current_epoch), batch_idx)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed, which looks for all kinds of devices, is slow
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the recipe's name, and the facts of the data."""
        data = getattr(self.trainer, "datamodule", None)
        checkpoint["recipe"] = self.recipe
        checkpoint["facts"] = getattr(data, "facts", self.facts)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another recipe or model; leave out the neurons that meSimp removed from its own.

        Raises:
            ValueError: it is one, or it is not known which layers lost neurons.
        """
        found = checkpoint.get("recipe", self.recipe)
        if found != self.recipe:
            raise ValueError(f"this checkpoint is of recipe={found}, the model is of recipe={self.recipe}")
        if any(name.startswith("MeSimp") for name in checkpoint.get("callbacks", {})):
            shrink(self, checkpoint["state_dict"])
        theirs, ours = (
            {key: getattr(each, "shape", None) for key, each in state.items()}
            for state in (checkpoint["state_dict"], self.state_dict())
        )
        if other := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
            told = {key: value for key, value in checkpoint.get("hyper_parameters", {}).items() if key in self.hparams}
            settings = [f"{key}={value}" for key, value in told.items() if self.hparams[key] != value]
            raise ValueError(
                f"this checkpoint is of another model, by {len(other)} parameters such as {other[0]}; make the model "
                f"as it was made{': ' if settings else ''}{', '.join(settings)}"
            )
        self.facts = checkpoint.get("facts", {})

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer over the groups of weight decay, and the schedule.

        It is advanced every step; every epoch where nobody knows an epoch's steps: with ``MinibatchSize``, which sets
        them, and where ranks share batches.

        Raises:
            ValueError: the run has no end, so that the schedule has no length, or a warm-up counts steps that change.
        """
        self.trainer.fit_loop.setup_data()  # so that the length of an epoch is known
        accumulate, epochs_in_all = self.trainer.accumulate_grad_batches, self.trainer.max_epochs or 0
        shared = math.isinf(self.trainer.num_training_batches) and self.trainer.max_steps < 0
        total = epochs_in_all if shared else self.trainer.estimated_stepping_batches
        if not math.isfinite(total) or total < 1:
            raise ValueError(f"{total} training steps: a schedule needs trainer.max_epochs or trainer.max_steps")
        per_epoch = 1 if shared else math.ceil(self.trainer.num_training_batches / accumulate)
        batch, reference = self.batch
        peak = batch * self.trainer.world_size * accumulate / reference if reference else 1.0
        epochs, steps = self.warmup
        searched = any(isinstance(each, MinibatchSize) for each in self.trainer.callbacks)  # type: ignore[attr-defined]
        by_epoch = searched or shared
        if by_epoch and steps:
            given = "minibatch=search" if searched else "batches that ranks share (strategy.share_work)"
            raise ValueError(
                f"recipe.warmup_steps={steps}: with {given}, schedules count epochs; set recipe.warmup_epochs, and "
                "recipe.warmup_steps=null"
            )
        if by_epoch:
            total, per_epoch = total / per_epoch, 1
        warmup = round(epochs * per_epoch) if steps is None else steps
        factor = partial(self.factor, total=round(total), peak=peak, warmup=warmup)
        if factor(0) != peak and warmup >= total:
            setting = "warmup_epochs" if steps is None else "warmup_steps"
            unit = "epochs" if by_epoch else "steps"
            rank_zero_warn(f"the warm-up of {warmup} {unit} outlasts the run of {round(total)}: lower recipe.{setting}")
        optimizer = self.make_optimizer(parameter_groups(self.model, decay_norm=self.decay_norm))
        interval, scheduler = "epoch" if by_epoch else "step", LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


def go_on_reading(trainer: Trainer) -> None:
    """Let a run that goes on from a checkpoint read on where that was written, also in the middle of an epoch.

    Its loader was made, and loader processes began to read, before Lightning told it the epoch. What was read already
    of an epoch is read again, and left out.

    Args:
        trainer: whose training starts.
    """
    loop: Any = trainer.fit_loop
    epoch = loop.epoch_progress.current
    within = epoch.ready > epoch.processed  # an epoch had begun, and not ended
    done = loop.epoch_loop.batch_progress.current.processed if within else 0
    if epoch.processed or done:
        for loader in loop._combined_loader.flattened:
            _set_sampler_epoch(loader, epoch.processed)
        iter(loop._data_fetcher)
        deque(islice(loop._data_fetcher.iterator, done), maxlen=0)


def parameter_groups(model: nn.Module, *, decay_norm: bool = False) -> list[dict[str, object]]:
    """Parameters for an optimizer: those with its own weight decay, and those with none.

    Args:
        model: the network.
        decay_norm: decay everything, as He et al. 2015; else spare norms' scale and shift and all biases, that is
            parameters of one dimension, as Goyal et al. 2017.
    """
    if decay_norm:
        return [{"params": list(model.parameters())}]
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
