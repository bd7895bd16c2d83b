"""What a strategy over a synchroniser, which leaves the model unwrapped, cannot be combined with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_REFUSED = {
    "ddp_comm_hook": "there is no DistributedDataParallel whose hook it could be; name a compressor",
    "ddp_comm_state": "there is no hook that it could be of; remove it",
    "ddp_comm_wrapper": "there is no hook to wrap; name a compressor",
    "model_averaging_period": "this strategy averages by itself; use its own settings",
}


def without_wrapper(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without those of DistributedDataParallel, which Lightning's command line gives with their defaults.

    Raises:
        ValueError: one of them is not the default.
    """
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    for name, value in given.items():
        if name in _REFUSED and value is not None:
            raise ValueError(f"{name}={value!r}: {_REFUSED[name]}")
        if name in theirs and value not in (None, theirs[name].default):
            raise ValueError(
                f"{name}={value!r} is an argument of DistributedDataParallel, which does not wrap the model here; "
                "remove it"
            )
    return {name: value for name, value in given.items() if name not in theirs}


def check_fit(name: str, trainer: Any, module: nn.Module, synchronises: bool) -> None:
    """Refuse what would have ranks talk, or look at clocks and weights, on their own.

    Args:
        name: of the strategy.
        trainer: of the fit.
        module: the model.
        synchronises: batch norm is to.

    Raises:
        ValueError: it is chosen.
    """
    if synchronises or any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        raise ValueError(
            f"{name} cannot be combined with SyncBatchNorm, which talks in every forward pass of all ranks; set "
            "sync_batchnorm=False: buffers are averaged where the models are"
        )
    if (seconds := getattr(trainer, "_val_check_time_interval", None)) is not None:
        raise ValueError(
            f"{name} cannot be combined with a val_check_interval of {seconds:g} s: each rank looks at its own "
            "clock, and they would validate at different steps; give a number of batches"
        )
    for callback in trainer.callbacks:
        if "WeightAveraging" in [each.__name__ for each in type(callback).__mro__]:
            raise ValueError(
                f"{name} cannot be combined with {type(callback).__name__}, which averages each rank's own model "
                "and swaps it in by itself; remove it, or use StochasticWeightAveraging"
            )
