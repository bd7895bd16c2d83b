"""Multiply learning rates by a factor for good, in an optimizer and in the schedules that go on computing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer, lr_scheduler

LINEAR = (
    lr_scheduler.ChainedScheduler,
    lr_scheduler.ConstantLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.ExponentialLR,
    lr_scheduler.LambdaLR,
    lr_scheduler.LinearLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.ReduceLROnPlateau,
    lr_scheduler.SequentialLR,
    lr_scheduler.StepLR,
)
"""Schedules that give ``factor`` times the rates if the rates that they keep are multiplied by it."""
IN_GROUPS = ("lr", "initial_lr")
IN_SCHEDULES = ("base_lrs", "_last_lr", "eta_min", "min_lrs", "default_min_lr")


def check_linear(optimizers: Iterable[Optimizer], configs: Iterable[Any]) -> None:
    """Check that a minibatch that is ``k`` times as large calls for ``k`` times the rate.

    Args:
        optimizers: of the Trainer.
        configs: of its schedules, Lightning's ``LRSchedulerConfig``.

    Raises:
        ValueError: an optimizer is not SGD, or a schedule counts steps or cannot be multiplied.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, SGD):
            raise ValueError(
                f"MinibatchSize multiplies the learning rate as the minibatch, which holds for torch.optim.SGD and not "
                f"for {type(optimizer).__name__}. Use SGD, or remove MinibatchSize and choose accumulate_grad_batches "
                "yourself"
            )
    for config in configs:
        name = type(config.scheduler).__name__
        if config.interval == "step":
            raise ValueError(
                f"MinibatchSize changes how many steps an epoch has, and {name} counts steps. Return it with interval "
                "'epoch' from configure_optimizers"
            )
        if unknown := [type(each).__name__ for each in _flat(config.scheduler) if not isinstance(each, LINEAR)]:
            raise ValueError(
                f"MinibatchSize cannot multiply the learning rates of {unknown[0]}. It can with "
                f"{', '.join(each.__name__ for each in LINEAR)} of torch.optim.lr_scheduler"
            )


def multiply(optimizers: Iterable[Optimizer], configs: Iterable[Any], factor: float) -> None:
    """Multiply the rates of all parameter groups, and those that schedules compute theirs from.

    Args:
        optimizers: see ``check_linear``.
        configs: see ``check_linear``.
        factor: above 0.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({name: _times(group[name], factor) for name in IN_GROUPS if name in group})
    for config in configs:
        for schedule in _flat(config.scheduler):
            held = vars(schedule)
            held.update({name: _times(held[name], factor) for name in IN_SCHEDULES if held.get(name) is not None})


def _flat(scheduler: Any) -> Iterator[Any]:
    """Yield a schedule and those inside it."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _flat(inner)


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_times(each, factor) for each in value)
    return value.mul_(factor) if isinstance(value, Tensor) else value * factor
