"""One training run on one rank: the curve of the averaged weights' held-out losses."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._target.averaging import Averaging, MakeOptimizer


class Data(Protocol):
    """A task's model, batches, optimizer and evaluation."""

    def model(self) -> nn.Module:
        """Return a new model, which depends on torch's seed and returns the loss of a batch."""

    def batches(self, seed: int, rank: int) -> Iterator[Tensor]:
        """Yield a rank's batches without end; equal for all methods."""

    def optimizer(self, rate: float) -> MakeOptimizer:
        """Return what makes the task's optimizer with a learning rate."""

    def losses(self, model: nn.Module, rank: int, ranks: int) -> Tensor:
        """Return sums of losses and counts, float64 [2, 2], of this rank's share of both halves of held-out data."""


MakeData = Callable[[Path], Data]


def build(data: Data, run: dict[str, Any], module: nn.Module, rate: float) -> Averaging:
    """Prepare a module for a run of ``methods``; collective."""
    averaging: Averaging = builder(run).build(run["settings"], module, data.optimizer(rate))
    return averaging


def builder(run: dict[str, Any]) -> Any:
    """Return the module that builds a run."""
    # by name: what was trained with PyTorch's code alone stays valid when the package changes
    return importlib.import_module(f"benchmarks._target.{run['by']}")


def train(
    data: Data,
    run: dict[str, Any],
    rate: float,
    seed: int,
    batches: int,
    until: list[float] | None,
    patience: int,
    every: int,
    decay: float,
) -> dict[str, Any]:
    """Train with one method.

    Args:
        data: of the task.
        run: of ``methods``.
        rate: of learning, constant.
        seed: of the initial weights and the data.
        batches: at most.
        until: losses of both halves at which to stop; None: never.
        patience: batches after which a run stops that never met ``until`` on the choosing half.
        every: batches between two evaluations.
        decay: of the moving average, per batch.

    Returns:
        ``curve``: [batch, loss on the choosing half, loss on the reported half], and ``finite``, whether it was so.
    """
    torch.manual_seed(seed)
    module = data.model()
    averaging, mean = build(data, run, module, rate), MovingAverage(module, decay)
    curve: list[list[float]] = []
    for number, batch in enumerate(data.batches(seed, dist.get_rank()), 1):
        averaging.batch(batch)
        mean.update(number)
        if number % every == 0 or number == batches:
            losses = mean.losses(data)
            curve += [[number, *(round(each, 5) for each in losses)]] if all(map(math.isfinite, losses)) else []
            met = until and all(loss <= least for loss, least in zip(losses, until, strict=True))
            late = until and number >= patience and all(chosen > until[0] for _, chosen, _ in curve)
            if met or late or number == batches or not all(map(math.isfinite, losses)):
                break
    averaging.close()
    return {"curve": curve, "finite": all(map(math.isfinite, losses))}


class MovingAverage:
    """A moving average of the weights of all ranks' models, which differ between rounds of local steps.

    Args:
        module: whose weights change.
        decay: of a batch, once there were many.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._weights, self._decay = list(module.parameters()), decay
        self._shown = copy.deepcopy(module)
        self._own = [each.detach().clone() for each in self._weights]

    @torch.no_grad()
    def update(self, number: int) -> None:
        """Take in the weights after a batch."""
        weight = max(1 - self._decay, 1 / (1 + number))  # until there were many, the plain mean
        for own, now in zip(self._own, self._weights, strict=True):
            own.lerp_(now, weight)

    @torch.no_grad()
    def losses(self, data: Data) -> list[float]:
        """Return the losses on both halves; collective."""
        for shown, own in zip(self._shown.parameters(), self._own, strict=True):
            shown.copy_(own)
            dist.all_reduce(shown.data)
            shown.div_(dist.get_world_size())
        sums = data.losses(self._shown, dist.get_rank(), dist.get_world_size())
        dist.all_reduce(sums)
        return [float(each) for each in sums[:, 0] / sums[:, 1]]
