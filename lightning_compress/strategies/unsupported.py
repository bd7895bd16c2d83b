"""Raise if a strategy with a model per rank is combined with something that it cannot work with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.core.kinds import kinds_of

_REFUSED = {
    "ddp_comm_hook": "this strategy has no DistributedDataParallel to hook. Give a compressor instead",
    "ddp_comm_state": "this strategy has no DistributedDataParallel hook. Remove it",
    "ddp_comm_wrapper": "this strategy has no DistributedDataParallel hook to wrap. Give a compressor instead",
    "model_averaging_period": "this strategy averages models itself. Use its own settings instead",
}
_LIGHTNING = ("lightning", "pytorch_lightning")


def without_wrapper(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without those of DistributedDataParallel.

    Lightning's command line passes them with their defaults.

    Raises:
        ValueError: one of them is not the default.
    """
    wrapper = inspect.signature(DistributedDataParallel.__init__).parameters
    for name, value in given.items():
        if name in _REFUSED and value is not None:
            raise ValueError(f"{name}={value!r}: {_REFUSED[name]}")
        if name in wrapper and value not in (None, wrapper[name].default):
            raise ValueError(
                f"{name}={value!r} is an argument of DistributedDataParallel, which does not wrap the model here. "
                "Remove it"
            )
    return {name: value for name, value in given.items() if name not in wrapper}


def check_fit(name: str, trainer: Any, module: nn.Module, synchronises: bool) -> None:
    """Raise if a rank would communicate, look at its clock, or swap weights without the other ranks.

    Args:
        name: of the strategy, for messages.
        trainer: of the fit.
        module: the model.
        synchronises: whether ``sync_batchnorm`` is set.

    Raises:
        ValueError: the trainer, model or a callback does one of these.
    """
    if synchronises or any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        raise ValueError(
            f"{name} cannot be combined with SyncBatchNorm, which communicates in every forward pass. Set "
            "sync_batchnorm=False: buffers are averaged when the models are"
        )
    if (seconds := getattr(trainer, "_val_check_time_interval", None)) is not None:
        raise ValueError(
            f"{name} cannot be combined with a val_check_interval of {seconds:g} s: the ranks' clocks differ, so they "
            "would validate at different steps. Give a number of batches"
        )
    for callback in trainer.callbacks:
        if "WeightAveraging" in kinds_of(callback):
            raise ValueError(
                f"{name} cannot be combined with {type(callback).__name__}, which swaps in an average of each rank's "
                "own model. Remove it, or use StochasticWeightAveraging"
            )


def check_clipping(trainer: Any, module: Any) -> None:
    """Raise if clipping by a rank's own norm would make averaged gradients differ between the ranks.

    Args:
        trainer: of the fit.
        module: the model; its own ``configure_gradient_clipping`` may clip the averaged gradients apart.

    Raises:
        ValueError: it would.
    """
    by_norm = trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value"  # None: by norm
    own = not type(module).configure_gradient_clipping.__module__.startswith(
        ("lightning.pytorch.", "pytorch_lightning.")
    )
    if by_norm and not own and module.automatic_optimization:
        raise ValueError(
            f"gradient_clip_val={trainer.gradient_clip_val} cannot be combined with average_gradients: each rank would "
            "clip the averaged gradients by the norm of its own local ones, and train another model. Use "
            "gradient_clip_algorithm='value', or clip the two apart in the module's configure_gradient_clipping"
        )


def check_still_scaled(precision: Any, optimizer: Any) -> None:
    """Raise if gradients that are about to be averaged were already divided by the factor of the GradScaler.

    The scaler has then looked for infinities, and would not see one that comes from another rank.

    Args:
        precision: Lightning's precision plugin, which may have a GradScaler.
        optimizer: that is about to step.

    Raises:
        ValueError: they were.
    """
    scaler = getattr(precision, "scaler", None)
    stage = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {}).get("stage")
    if getattr(stage, "name", "") == "UNSCALED":
        raise ValueError(
            f"scaler.unscale_() was called before the step of {type(optimizer).__name__}, whose gradients are averaged "
            "in the step. Remove the call: Lightning unscales after the average, before on_before_optimizer_step, "
            "where you can clip"
        )
