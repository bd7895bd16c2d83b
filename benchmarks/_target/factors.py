"""Sufficient factors of linear layers: rows of inputs and of gradients travel in place of their products."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._network.methods import LINK
from benchmarks._target.averaging import Averaging, MakeOptimizer
from lightning_compress.backward import sufficient_factors
from lightning_compress.engine.attach import attach


def build(settings: dict[str, Any], module: nn.Module, optimizer: MakeOptimizer) -> Averaging:
    """Enable factors where they pay, and average the rest; collective.

    Args:
        settings: ``dtype`` of what travels, and ``rest``, the compressor of what is no linear layer.
        module: returns the loss of a batch.
        optimizer: makes one.

    Raises:
        ValueError: they pay in no layer.
    """
    factors = sufficient_factors.FactorSettings(dtype=settings["dtype"], link=LINK)
    swapped = sufficient_factors.enable(module, factors)
    if swapped is None:
        raise ValueError(f"sufficient factors pay in no layer of {type(module).__name__}")
    model = DistributedDataParallel(module)
    stepper = optimizer(module.parameters())
    handle = attach(model, settings["rest"], optimizer=stepper)
    swapped.begin(model, handle)
    handle.at_close(swapped.close)
    return Averaging(model, stepper, close=handle.close)
