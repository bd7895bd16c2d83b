"""Sufficient factors of linear layers: rows of inputs and of gradients travel in place of their products."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks._network.methods import make
from benchmarks._target.averaging import Averaging, MakeOptimizer
from lightning_compress.engine.checks import AVERAGED_ELSEWHERE


def build(settings: dict[str, Any], module: nn.Module, optimizer: MakeOptimizer) -> Averaging:
    """Enable factors where they pay, and average the rest; collective.

    Args:
        settings: ``method``, its name in ``benchmarks.network``.
        module: returns the loss of a batch.
        optimizer: makes one.

    Raises:
        ValueError: they pay in no layer.
    """
    model, handle = make(settings["method"])(module)
    if handle is None or not getattr(module, AVERAGED_ELSEWHERE, ()):
        raise ValueError(f"sufficient factors pay in no layer of {type(module).__name__}")
    return Averaging(model, optimizer(module.parameters()), close=handle.close)
