"""Choose the minibatch size during training: try sizes on a probe, and take the largest that loses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_compress.callbacks import wraps_model
from lightning_compress.collectives.counting import now
from lightning_compress.contrib.minibatch.probe import Probe, check_loader
from lightning_compress.contrib.minibatch.rates import check_linear, multiply
from lightning_compress.core.kinds import kinds_of
from lightning_compress.settings.parsing import must

__all__ = ["MinibatchSize", "MinibatchSizeMixin"]

LEAST_STEPS = 4
"""Steps that the largest size takes on the probe, at least: the first one's losses are those of the untrained model."""
_CLASHES = {
    "GradientAccumulationScheduler": "sets accumulate_grad_batches as well",
    "StochasticWeightAveraging": "sets learning rates of its own",
    "MePropMixin": "counts steps and keeps memories that a search would change",
}
"""Callbacks that cannot be combined with it, by the name of a base class, and why."""


def sizes_to_try(previous: int, least: int, largest: int) -> list[int]:
    """Return sizes by factors of sqrt(2), rounded, each once, in ascending order.

    Args:
        previous: the present size; sizes go from half of it to twice as much.
        least: none is smaller, 1 or more.
        largest: none is larger, unless ``previous / 2`` is: then that one alone is returned.
    """
    low, high = max(least, math.ceil(previous / 2)), min(largest, 2 * previous)
    powers = range(1 + math.floor(2 * math.log2(max(1.0, high / low)) + 1e-9))
    return sorted({math.floor(low * 2 ** (power / 2) + 0.5) for power in powers})


def largest_good(
    sizes: Sequence[int], loss_of: Callable[[int], float], margin: float
) -> tuple[int | None, list[float]]:
    """Return the last size before the loss exceeds the first one's by more than the margin, and the losses.

    Args:
        sizes: in ascending order.
        loss_of: trains with a size from the same state and returns the mean loss. It is not called for sizes beyond the
            first bad one.
        margin: percent of the first loss's magnitude.

    Returns:
        The size, or None if already the first loss is not finite; and the loss of each size that was tried. A loss
        that is not finite is bad. (In CNTK, NaN is good.)
    """
    losses: list[float] = []
    good = None
    for size in sizes:
        losses.append(loss_of(size))
        if not losses[-1] <= losses[0] + abs(losses[0]) * margin / 100 or math.isinf(losses[-1]):
            break
        good = size
    return good, losses


class MinibatchSizeMixin:
    """Makes a ``Callback`` choose the minibatch size; see ``MinibatchSize``."""

    def __init__(
        self, largest: int, epochs: int | Sequence[int] = 5, margin: float = 1.0, probe: int | float = 0.5
    ) -> None:
        must(lambda value: _whole(value) and value > 1, "a whole number of batches, 2 or more")("largest", largest)
        share = must(lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a percentage, 0.0 or more")
        share("margin", margin)
        fits = lambda value: _whole(value) or (type(value) is float and 0 < value <= 1)  # noqa: E731
        must(fits, "a number of batches, or a share of the epoch above 0.0 and at most 1.0")("probe", probe)
        self.largest, self.epochs, self.margin, self.probe = largest, _epochs(epochs), float(margin), probe
        self.size = self._least = 0
        self.history: list[dict[str, Any]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that sizes can be changed.

        Raises:
            ValueError: the strategy, the Trainer, the module or another callback does not allow it; on every rank.
        """
        if stage != "fit":
            return
        self._least = trainer.accumulate_grad_batches
        self.size, self.history = self._least, []
        _check_trainer(trainer, pl_module)
        if self.largest <= self._least:
            raise ValueError(
                f"MinibatchSize(largest={self.largest}): must be above the size to begin with, which is "
                f"accumulate_grad_batches={self._least}"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check optimizers and schedules; continue with the size of a checkpoint.

        Raises:
            ValueError: see ``check_linear``; on every rank.
        """
        check_linear(trainer.optimizers, trainer.lr_scheduler_configs)
        trainer.accumulate_grad_batches = self.size

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the training batches.

        Raises:
            ValueError: they cannot be read twice, or the probe is too short; on every rank.
        """
        if not trainer.fast_dev_run:
            check_loader(trainer)
            self._check_probe(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Search before an epoch's first batch if that is due.

        Lightning leaves ``on_train_epoch_start`` out after a resume from a checkpoint of an epoch's last step.
        """
        epoch = trainer.current_epoch
        due = epoch in self.epochs if isinstance(self.epochs, tuple) else epoch > 0 and epoch % self.epochs == 0
        if due and batch_idx == 0:
            self._search(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the Trainer its own size back."""
        if stage == "fit" and self._least:
            trainer.accumulate_grad_batches = self._least

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the Trainer its own size back; Lightning leaves ``teardown`` out."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from; optimizers and schedules keep the rates that belong to it."""
        return {"size": self.size, "history": self.history}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See ``state_dict``."""
        self.size, self.history = int(state_dict["size"]), list(state_dict["history"])

    def _batches(self, trainer: Any) -> int:
        """Return how many batches a probe has on each rank."""
        if isinstance(self.probe, int):
            return int(min(self.probe, trainer.num_training_batches))
        if math.isinf(trainer.num_training_batches):
            raise ValueError(
                f"MinibatchSize(probe={self.probe}) is a share of an epoch whose length is not known. Give a number of "
                "batches, such as probe=500"
            )
        return math.floor(self.probe * int(trainer.num_training_batches))

    def _check_probe(self, trainer: Any) -> None:
        if (batches := self._batches(trainer)) < LEAST_STEPS * self.largest:
            raise ValueError(
                f"MinibatchSize(largest={self.largest}, probe={self.probe}): the probe has {batches} of the epoch's "
                f"{trainer.num_training_batches} batches, but must have {LEAST_STEPS} steps of largest, "
                f"{LEAST_STEPS * self.largest} batches. Lower largest, raise probe, or use smaller batches"
            )

    def _search(self, trainer: Any, module: Any) -> None:
        """Choose the size by the mean losses over all ranks, and scale the rates. Collective."""
        before, sizes, start = self.size, sizes_to_try(self.size, self._least, self.largest), now(module.device)
        probe = Probe(trainer, module, self._batches(trainer))
        good, losses = largest_good(sizes, lambda size: probe.loss(size, size / before), self.margin)
        self.size = before if good is None else good
        if self.size != before:
            multiply(trainer.optimizers, trainer.lr_scheduler_configs, self.size / before)
            trainer.accumulate_grad_batches = self.size
        found = {
            "epoch": trainer.current_epoch,
            "size": self.size,
            "losses": dict(zip(sizes, losses, strict=False)),
            "samples": probe.samples * len(losses),
            "seconds": now(module.device) - start,
        }
        self.history.append(found | ({} if probe.bytes_sent is None else {"bytes": probe.bytes_sent}))
        self._tell(trainer, good is None)

    def _tell(self, trainer: Any, failed: bool) -> None:
        """Log the last search: its result and its cost."""
        found = self.history[-1]
        tried = ", ".join(f"{size}: {loss:.4g}" for size, loss in found["losses"].items())
        rank_zero_info(
            f"MinibatchSize: from epoch {found['epoch']} on, accumulate_grad_batches={found['size']}; loss by size "
            f"{tried}; the search took {found['samples']:,} samples and {found['seconds']:.1f} s"
        )
        if failed:
            rank_zero_warn(f"MinibatchSize: the loss on the probe is not finite ({tried}); the size stays as it was")
        figures = {f"search_{name}": found[name] for name in ("samples", "seconds", "bytes") if name in found}
        for logger in trainer.loggers:
            row = trainer.fit_loop.epoch_loop._batches_that_stepped
            named = {"accumulate_grad_batches": found["size"], **figures}
            logger.log_metrics({f"minibatch/{name}": float(value) for name, value in named.items()}, row)


def _whole(value: object) -> bool:
    return type(value) is int and value > 0


def _epochs(given: object) -> int | tuple[int, ...]:
    """Read the number of epochs between searches, or those before which to search."""
    if isinstance(given, int) and _whole(given):
        return given
    listed = tuple(given) if isinstance(given, Sequence) else ()
    if not listed or not all(map(_whole, listed)):
        raise ValueError(
            f"epochs={given!r} must be a whole number from 1 on, or a list of such. Epoch 0 has no search: nothing is "
            "trained yet"
        )
    return listed


def _check_trainer(trainer: Any, module: Any) -> None:
    """Raise ValueError if the Trainer, the module, the strategy or another callback does not allow changes."""
    if not (wraps_model(trainer.strategy) or "SingleDeviceStrategy" in kinds_of(trainer.strategy)):
        raise ValueError(
            "MinibatchSize needs Trainer(strategy=CompressedDDPStrategy(...)), strategy='ddp' or one device, not "
            f"{type(trainer.strategy).__name__}"
        )
    if trainer.max_steps != -1 and not trainer.fast_dev_run:
        raise ValueError(
            f"MinibatchSize changes how many samples a step has, so max_steps={trainer.max_steps} would end the "
            "training after an unknown number of samples. Use Trainer(max_epochs=...) or max_time instead"
        )
    if not module.automatic_optimization:
        raise ValueError(
            "MinibatchSize works through accumulate_grad_batches, which manual optimization does not follow. Use "
            "automatic optimization, or remove MinibatchSize"
        )
    if getattr(trainer.strategy, "_ddp_kwargs", {}).get("static_graph"):
        raise ValueError("MinibatchSize accumulates gradients, which static_graph=True cannot: set static_graph=False")
    for callback in trainer.callbacks:
        for clash in _CLASHES.keys() & kinds_of(callback):
            raise ValueError(
                f"MinibatchSize cannot be combined with {type(callback).__name__}, which {_CLASHES[clash]}. Remove one"
            )
    settings = getattr(trainer.strategy, "_settings", None)
    courses = () if settings is None else settings.options.schedule.courses
    if by_step := [name for name, course in courses if getattr(course, "unit", "") == "step"]:
        raise ValueError(
            f"MinibatchSize changes how many steps an epoch has, and the schedule of {by_step[0]} counts steps. Let it "
            "count epochs, such as {'unit': 'epoch', 'values': {0: 0.25, 4: 0.01}}"
        )


class MinibatchSize(MinibatchSizeMixin, Callback):
    """Chooses how many batches a step accumulates, by short trainings on the first batches of an epoch.

    Data-parallel training sends less the larger its minibatches are, but too large ones learn less per sample. How
    large they may be grows during training. So before some epochs, several sizes train on the same batches, each from
    the present state. The first has half the present batches per step (or as many as the run began with), each further
    one sqrt(2) times as many, rounded, up to twice the present number. The first whose mean loss is more than
    ``margin`` percent above the first one's ends the search, and the size before it is taken. From Seide et al.,
    "1-Bit Stochastic Gradient Descent", Interspeech 2014, by CNTK's rule (SearchForBestMinibatchSize).

    The rate per sample stays constant: a step of ``k`` times as many batches has ``k`` times the learning rate, during
    the search and afterwards (the linear rule, for SGD). Momentum and weight decay stay as they are. The rates of the
    optimizer and of its schedules are those of the size that the run begins with, ``Trainer(accumulate_grad_batches)``.
    Code that sets the rate itself during training overrides this.

    A search leaves nothing behind but the size and the rates: the model, the optimizer, random numbers, the order of
    batches, residuals and counters are as they were. All ranks decide by the mean of their losses. A search trains on
    up to five probes, which cost time and traffic; both are logged as ``minibatch/search_samples``, ``search_seconds``
    and ``search_bytes`` (of a compressed strategy), beside ``minibatch/accumulate_grad_batches``. The monitor's totals
    leave them out. It needs twice the memory of the model, the optimizer's state and the residuals.

    Args:
        largest: most batches of a step on each rank, above ``Trainer(accumulate_grad_batches)``.
        epochs: search before every so many epochs, or before each of these; epochs count from 0, which has no search.
        margin: percent that the loss may be above that of the smallest size.
        probe: batches of the epoch, on each rank, that a size trains on: a number, or a share of the epoch (a float).
            At least 4 steps of ``largest``.

    Attributes:
        size: batches of a step now.
        history: a mapping for each search: ``epoch``, ``size``, ``losses`` by size, ``samples``, ``seconds``, ``bytes``
            (of rank 0).

    Raises:
        ValueError: a value is not allowed. When training begins: the optimizer is not SGD, a schedule counts steps,
            ``max_steps`` is set, optimization is manual, another callback sets ``accumulate_grad_batches``, the
            strategy is of another kind, or batches cannot be read twice.
    """
